#include "shardtensor/comm/primitives/exchange_boxes.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "../gradient.h"
#include "../pieces.h"
#include "../thread_ranks.h"
#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/comm/primitives/exchange_code.h"
#include "shardtensor/comm/primitives/exchange_schedule.h"

namespace shardtensor::detail {
namespace {

using testing::gradient;
using testing::index_filled;
using testing::piece;
using testing::run_on_mesh;

class ExchangeBoxes : public testing::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(
    On,
    ExchangeBoxes,
    testing::each_backend(),
    testing::backend_name);

// ---- many small boxes -------------------------------------------------------

/// All rows, or each third one, last one first: a box for each.
std::vector<int64_t> rows_backwards(
    int64_t position,
    bool all,
    int64_t extent = 90) {
  std::vector<int64_t> rows;
  for (int64_t row = extent - 1; row >= 0; --row) {
    if (all || row % 3 == position) {
      rows.push_back(row);
    }
  }
  return rows;
}

TEST_P(ExchangeBoxes, TakeOneKernelWhereTheyAreManyAndSmall) {
  for (const bool all : {true, false}) {
    for (const int64_t dim : {0, 1}) {
      run_on_mesh({3}, [&](const MeshPtr& mesh) {
        std::vector<int64_t> sizes{4, 4, 2};
        sizes[dim] = 90;
        const auto spec = make_spec(mesh, sizes, {Placement::shard(dim)});
        const auto rows = [&](int64_t, int64_t position) {
          return RowSource(rows_backwards(position, all));
        };
        const auto plan = plan_gather_rows(spec, {dim}, rows, mesh->position());
        const auto encoded = encode(plan, *mesh);
        const ExchangeSchedule schedule(encoded.code, 4, /*adds=*/false);
        EXPECT_TRUE(schedule.rounds[0].sends.rows.defined());
        EXPECT_TRUE(schedule.rounds[0].receives.rows.defined());
        EXPECT_EQ(schedule.rounds[0].sends.row_length, dim == 0 ? 8 : 2);
        const auto whole = index_filled(sizes, at::kFloat);
        const auto wanted = whole.index_select(
            dim, at::tensor(rows_backwards(mesh->position(), all)));
        const auto x = piece(whole, *spec);
        EXPECT_TRUE(at::equal(exchange(x, encoded), wanted));
        const auto back = exchange(wanted, adjoint(encoded));
        EXPECT_TRUE(at::equal(back, all ? x * 3 : x));
        const auto strided = x.transpose(0, 1).contiguous().transpose(0, 1);
        EXPECT_TRUE(at::equal(exchange(strided, encoded), wanted));
      });
    }
  }
}

TEST_P(ExchangeBoxes, HaveAnyDtype) {
  for (const auto dtype :
       {at::kBool, at::kHalf, at::kUInt16, at::kFloat8_e4m3fn}) {
    run_on_mesh({3}, [&](const MeshPtr& mesh) {
      const auto spec = make_spec(mesh, {90, 2}, {Placement::shard(0)});
      const auto plan = plan_gather_rows(
          spec,
          {0},
          [](int64_t, int64_t p) { return RowSource(rows_backwards(p, true)); },
          mesh->position());
      const auto whole = index_filled({90, 2}, at::kFloat).to(dtype);
      const auto y = exchange(piece(whole, *spec), plan, *mesh);
      EXPECT_TRUE(at::equal(y.to(at::kFloat), whole.to(at::kFloat).flip(0)))
          << dtype;
    });
  }
}

TEST(ExchangeSchedule, KnowsWhichBoxesOneKernelTakes) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto made = [&](int64_t columns, bool adds, int64_t extent = 90) {
      const auto spec =
          make_spec(mesh, {extent, columns}, {Placement::shard(0)});
      const auto plan = plan_gather_rows(
          spec,
          {0},
          [&](int64_t, int64_t position) {
            return RowSource(rows_backwards(position, true, extent));
          },
          mesh->position());
      return ExchangeSchedule(encode(plan, *mesh).code, 4, adds);
    };
    EXPECT_TRUE(made(4, false).own_target.rows.defined());
    EXPECT_FALSE(made(4, true).own_target.rows.defined()); // sums, on the host
    EXPECT_TRUE(made(4, true).own_source.rows.defined());
    EXPECT_TRUE(made(8192, false).own_source.rows.defined());
    EXPECT_FALSE(made(8192, false).own_target.rows.defined()); // large boxes
    EXPECT_FALSE(made(16384, false).own_source.rows.defined());
    EXPECT_TRUE(made(4, false, 8).own_target.rows.defined()); // four are many
    EXPECT_FALSE(made(4, false, 6).own_target.rows.defined());
  });
}

// ---- channels last ----------------------------------------------------------

constexpr auto kLast = at::MemoryFormat::ChannelsLast;

struct ImageLayouts {
  std::vector<int64_t> mesh;
  std::vector<int64_t> sizes;
  std::vector<Placement> from;
  std::vector<Placement> to;
  ShardSpec::Partitions to_cut = {};

  at::MemoryFormat format() const {
    return sizes.size() == 5 ? at::MemoryFormat::ChannelsLast3d : kLast;
  }
};

/// Every dim of images and volumes; one sample, one channel, nothing at all.
std::vector<ImageLayouts> image_layouts() {
  const auto replicated = Placement::replicate();
  const auto rows = Placement::shard(2);
  const auto columns = Placement::shard(3);
  const auto channels = Placement::shard(1);
  const auto none = std::nullopt;
  return {
      {{2}, {1, 3, 6, 4}, {rows}, {columns}},
      {{2}, {2, 2, 6, 4}, {channels}, {rows}},
      {{3}, {2, 3, 5, 4}, {Placement::shard(0)}, {replicated}},
      {{3},
       {2, 3, 5, 4},
       {columns},
       {rows},
       {none, none, Partition({0, 5, 0}), none}},
      {{3}, {2, 3, 5, 4}, {Placement::partial()}, {rows}},
      {{2}, {2, 1, 5, 4}, {rows}, {replicated}},
      {{2}, {2, 0, 5, 4}, {rows}, {columns}},
      {{2, 2}, {2, 3, 5, 4}, {rows, columns}, {replicated, channels}},
      {{2}, {2, 3, 4, 5, 2}, {rows}, {Placement::shard(4)}},
  };
}

struct MovedImage {
  SpecPtr from;
  SpecPtr to;
  EncodedExchange encoded;

  MovedImage(const ImageLayouts& l, const MeshPtr& mesh)
      : from(make_spec(mesh, l.sizes, l.from)),
        to(make_spec(mesh, l.sizes, l.to, l.to_cut)),
        encoded(encode(plan_redistribute(from, to, mesh->position()), *mesh)) {}
};

TEST_P(ExchangeBoxes, OfChannelsLastArriveTheSame) {
  for (const auto& l : image_layouts()) {
    run_on_mesh(l.mesh, [&](const MeshPtr& mesh) {
      const MovedImage m(l, mesh);
      // Whether a piece lies as all of them show is its rank's own affair.
      const auto own = piece(index_filled(l.sizes, at::kFloat), *m.from);
      const auto x = mesh->position() == 1 ? own : own.contiguous(l.format());
      const auto y = exchange(x, m.encoded, l.format());
      EXPECT_TRUE(at::equal(y, exchange(own, m.encoded))) << *m.from << *m.to;
      EXPECT_TRUE(y.is_contiguous(l.format())) << *m.from << *m.to;
    });
  }
}

TEST_P(ExchangeBoxes, OfChannelsLastHaveTheSameGradient) {
  for (const auto& l : image_layouts()) {
    run_on_mesh(l.mesh, [&](const MeshPtr& mesh) {
      const MovedImage m(l, mesh);
      const auto x = at::randn(m.from->local_sizes(), at::kDouble)
                         .contiguous(l.format())
                         .set_requires_grad(true);
      const auto gy = at::randn(m.to->local_sizes(), at::kDouble);
      const auto last = gradient(exchange(x, m.encoded, l.format()), x, gy);
      EXPECT_TRUE(at::equal(last, gradient(exchange(x, m.encoded), x, gy)));
      EXPECT_TRUE(last.is_contiguous(l.format()));
    });
  }
}

TEST_P(ExchangeBoxes, OfChannelsLastAreAddedOnto) {
  run_on_mesh({3}, [](const MeshPtr& mesh) {
    const MovedImage m(image_layouts()[4], mesh); // Partial to rows
    const auto x = at::full({2, 3, 5, 4}, mesh->position() + 1.0);
    const auto onto = [&](at::MemoryFormat format) {
      at::Tensor target;
      exchange_onto(target, x, in_format(m.encoded, format), [&] {
        target = at::zeros(m.to->local_sizes()).contiguous(format);
      });
      return target;
    };
    EXPECT_TRUE(at::equal(onto(kLast), at::full(m.to->local_sizes(), 6.0)));
    EXPECT_TRUE(at::equal(onto(kLast), onto(at::MemoryFormat::Contiguous)));
  });
}

/// What rank 0 of two sends and receives for a halo of one row.
struct HaloOfImage {
  EncodedExchange encoded;
  ExchangeSchedule schedule;

  HaloOfImage(const MeshPtr& mesh, at::MemoryFormat format)
      : encoded(in_format(encode(plan(mesh), *mesh), format)),
        schedule(encoded.code, 4, /*adds=*/false) {}

  static ExchangePlan plan(const MeshPtr& mesh) {
    const auto spec = make_spec(mesh, {1, 3, 8, 5}, {Placement::shard(2)});
    const auto rows = [](int64_t, int64_t position) {
      return position == 0 ? RowSource{0, 1, 2, 3, 4}
                           : RowSource{3, 4, 5, 6, 7};
    };
    return plan_gather_rows(spec, {2}, rows, mesh->position());
  }
};

TEST(ExchangeBoxesInPlace, RowsOfOneSampleAreOneRunOfMemory) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const auto image = at::randn({1, 3, 4, 5}).contiguous(kLast);
    const HaloOfImage last(mesh, kLast);
    const auto boxed = image.movedim(1, -1);
    const auto& sends = last.schedule.rounds[0].sends;
    EXPECT_TRUE(pack(boxed, sends).is_alias_of(image));
    const auto target = at::zeros({1, 5, 5, 3});
    const auto& receives = last.schedule.rounds[0].receives;
    EXPECT_TRUE(in_place_buffer(target, receives).defined());
    // Rows of planes are not.
    const HaloOfImage first(mesh, at::MemoryFormat::Contiguous);
    const auto& planes = first.schedule.rounds[0].sends;
    EXPECT_FALSE(pack(image.contiguous(), planes).is_alias_of(image));
  });
}

TEST(ExchangeBoxesInPlace, ChannelsLastStandInTheOrderOfMemory) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const HaloOfImage halo(mesh, kLast);
    const auto& code = halo.schedule.code;
    EXPECT_TRUE(code.channels_last);
    EXPECT_EQ(code.source.sizes, c10::IntArrayRef({1, 4, 5, 3}));
    EXPECT_EQ(in_order_of_dims(code.target.sizes), at::DimVector({1, 3, 5, 5}));
    const auto turned = adjoint(halo.encoded);
    EXPECT_TRUE(decode(turned.code).channels_last);
    EXPECT_EQ(adjoint(turned).code, halo.encoded.code);
  });
}

// ---- errors -----------------------------------------------------------------

TEST(ExchangeBoxesInPlace, ChannelsLastHasFourOrFiveDims) {
  ExchangePlan plan;
  plan.source_sizes = plan.target_sizes = {2, 3};
  const auto code = in_format({encode(plan, 0, {0}), ""}, kLast);
  try {
    exchange(at::zeros({2, 3}), code);
    FAIL() << "expected an error";
  } catch (const c10::ValueError& error) {
    EXPECT_STREQ(
        error.what_without_backtrace(),
        "shardtensor::exchange: the code has channels last of tensors from [2, "
        "3] to [2, 3], expected 4 or 5 dims");
  }
}

TEST(ExchangeBoxesInPlace, AnErrorShowsSizesAsTensorsHaveThem) {
  run_on_mesh({2}, [](const MeshPtr& mesh) {
    const HaloOfImage halo(mesh, kLast);
    try {
      exchange(at::zeros({1, 4, 5, 3}), halo.encoded);
      FAIL() << "expected an error";
    } catch (const c10::ValueError& error) {
      EXPECT_STREQ(
          error.what_without_backtrace(),
          "shardtensor::exchange: the local tensor has sizes [1, 4, 5, 3], the "
          "plan expects [1, 3, 4, 5]");
    }
  });
}

} // namespace
} // namespace shardtensor::detail
