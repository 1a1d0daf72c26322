#include "shardtensor/dispatch/labels.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "../layout/parts.h"

namespace shardtensor {
namespace {

using namespace testing;

using Sizes = std::vector<int64_t>;
using RuleOf = std::function<Decision(Call& call)>;

/// What `position` holds: of a sum of terms, the first rank of a Partial axis
/// has everything.
at::Tensor term_of(
    const at::Tensor& global,
    const ShardSpec& spec,
    int64_t position) {
  auto local = part_of(global, spec, position);
  for (const int64_t axis : spec.partial_axes()) {
    if (spec.mesh()->coordinate(position, axis) > 0) {
      local = at::zeros_like(local);
    }
  }
  return local;
}

/// The sum of all terms that reach `position`.
at::Tensor summed(
    const std::vector<at::Tensor>& terms,
    const ShardSpec& spec,
    int64_t position) {
  std::vector<int64_t> positions{position};
  const auto& mesh = *spec.mesh();
  for (const int64_t axis : spec.partial_axes()) {
    std::vector<int64_t> more;
    for (const int64_t one : positions) {
      for (int64_t rank = 0; rank < mesh.ranks(axis); ++rank) {
        more.push_back(mesh.with_coordinate(one, axis, rank));
      }
    }
    positions = more;
  }
  auto sum = at::zeros_like(terms[position]);
  for (const int64_t one : positions) {
    sum += terms[one];
  }
  return sum;
}

/// With every rank's part of the inputs in the layouts that the rule asks for,
/// the operator gives the part that the rule promises.
void check_rule(
    const char* name,
    const char* overload,
    const std::vector<SpecPtr>& specs,
    const std::vector<c10::IValue>& others,
    const RuleOf& rule) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  torch::jit::Stack stack;
  std::vector<at::Tensor> globals;
  for (const auto& spec : specs) {
    globals.push_back(numbered(spec->sizes()) + 1);
    stack.push_back(wrap(part_of(globals.back(), *spec, 0), spec));
  }
  stack.insert(stack.end(), others.begin(), others.end());
  Call call(op, stack);
  const auto decision = rule(call);
  const auto run = [&](const std::vector<at::Tensor>& tensors) {
    torch::jit::Stack local(tensors.begin(), tensors.end());
    local.insert(local.end(), others.begin(), others.end());
    op.callBoxed(&local);
    return local.back().toTensor();
  };
  const auto expected = run(globals);
  const auto& mesh = *specs[0]->mesh();
  std::vector<at::Tensor> results;
  for (int64_t position = 0; position < mesh.ranks(); ++position) {
    std::vector<at::Tensor> locals;
    for (size_t i = 0; i < specs.size(); ++i) {
      ASSERT_EQ(decision.inputs[i]->sizes(), specs[i]->sizes());
      locals.push_back(term_of(globals[i], *decision.inputs[i], position));
    }
    results.push_back(run(locals));
  }
  const auto& output = *decision.outputs.at(0);
  for (int64_t position = 0; position < mesh.ranks(); ++position) {
    ASSERT_TRUE(summed(results, output, position)
                    .equal(part_of(expected, output, position)))
        << name << " of " << *specs[0] << " and " << *specs.back() << " -> "
        << output;
  }
}

void for_each_pair(
    unsigned seed,
    const Sizes& first,
    const Sizes& second,
    const std::function<void(const std::vector<SpecPtr>& specs)>& visit) {
  std::mt19937 random(seed);
  for (const auto& shape :
       {Sizes{1}, Sizes{2}, Sizes{3}, Sizes{2, 2}, Sizes{2, 3}}) {
    const auto mesh = mesh_of(shape);
    const auto layout = [&](const Sizes& sizes) {
      return random_spec(
          random,
          mesh,
          sizes,
          random_placements(random, mesh->axes(), sizes.size(), true),
          true);
    };
    for (int trial = 0; trial < 60; ++trial) {
      visit({layout(first), layout(second)});
    }
  }
}

Decision product_rule(Call& call) {
  return rule_by_labels(call, broadcast_labels(call), Linearity::Product);
}

Decision sum_rule(Call& call) {
  return rule_by_labels(call, broadcast_labels(call), Linearity::Additive);
}

Decision matrix_rule(Call& call) {
  return rule_by_labels(call, {{{0, 1}, {1, 2}}, {{0, 2}}}, Linearity::Product);
}

TEST(Labels, BroadcastOperandsOfAnyTwoLayouts) {
  for (const auto& second :
       {Sizes{4, 6}, Sizes{6}, Sizes{4, 1}, Sizes{1, 6}, Sizes{1}}) {
    for_each_pair(1, {4, 6}, second, [&](const auto& specs) {
      check_rule("aten::mul", "Tensor", specs, {}, pointwise_rule);
      check_rule("aten::mul", "Tensor", specs, {}, product_rule);
      check_rule("aten::add", "Tensor", specs, {at::Scalar(1)}, sum_rule);
    });
  }
}

TEST(Labels, ContractedDimsOfAnyTwoLayouts) {
  for_each_pair(2, {4, 6}, {6, 8}, [&](const auto& specs) {
    check_rule("aten::mm", "", specs, {}, matrix_rule);
  });
}

Decision batch_rule(Call& call) {
  return rule_by_labels(
      call, {{{3, 0, 1}, {3, 1, 2}}, {{3, 0, 2}}}, Linearity::Product);
}

TEST(Labels, BatchesOfAnyTwoLayouts) {
  for_each_pair(5, {3, 4, 6}, {3, 6, 8}, [&](const auto& specs) {
    check_rule("aten::bmm", "", specs, {}, batch_rule);
  });
}

TEST(Labels, ACutSumCountsLessThanACutBatchByItsTerms) {
  const auto mesh = mesh_of({2});
  const auto left = make_spec(mesh, {2, 40, 6}, {Placement::shard(2)});
  for (const int64_t columns : {1, 4}) { // 2 x 80 terms of 480, or 2 x 320
    const auto right = make_spec(mesh, {2, 6, columns}, {Placement::shard(0)});
    check_rule("aten::bmm", "", {left, right}, {}, [&](Call& call) {
      const auto decision = batch_rule(call);
      EXPECT_EQ(decision.inputs[0]->is_sharded(0), columns == 4);
      EXPECT_EQ(decision.outputs[0]->has_partial(), columns == 1);
      return decision;
    });
  }
}

TEST(Labels, APrivateDimIsNeverCut) {
  for_each_pair(3, {4, 6}, {4, 6}, [&](const auto& specs) {
    check_rule("aten::mul", "Tensor", specs, {}, [](Call& call) {
      const Labels labels{{{0, kPrivate}, {0, kPrivate}}, {{0, kPrivate}}};
      const auto decision = rule_by_labels(call, labels, Linearity::None);
      EXPECT_FALSE(decision.outputs[0]->is_sharded(1));
      EXPECT_FALSE(decision.inputs[0]->is_sharded(1));
      EXPECT_FALSE(decision.outputs[0]->has_partial());
      return decision;
    });
  });
}

TEST(Labels, TheLargerOperandStaysAndTheOtherFollows) {
  for_each_pair(4, {4, 6}, {6}, [&](const auto& specs) {
    if (!specs[0]->has_partial()) {
      check_rule("aten::mul", "Tensor", specs, {}, [&](Call& call) {
        const auto decision = pointwise_rule(call);
        for (const int64_t dim : specs[0]->sharded_dims()) {
          EXPECT_EQ(
              decision.inputs[0]->partition(dim), specs[0]->partition(dim));
        }
        return decision;
      });
    }
  });
}

} // namespace
} // namespace shardtensor
