#include "shardtensor/rules/points/bisection.h"

#include <algorithm>
#include <bit>
#include <limits>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "shardtensor/collectives/exchange_rows.h"

namespace shardtensor::detail {
namespace {

using Numbers = std::vector<int64_t>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// An integer in the same order.
int64_t ordered_bits(double value) {
  const auto bits = std::bit_cast<int64_t>(value + 0.0); // no negative zero
  return bits < 0 ? std::numeric_limits<int64_t>::min() - bits : bits;
}

/// Between the two, nearer to low, whatever their signs.
int64_t middle_of(int64_t low, int64_t high) {
  return low +
      static_cast<int64_t>(
             (static_cast<uint64_t>(high) - static_cast<uint64_t>(low)) / 2);
}

struct Item {
  int64_t key;
  int64_t row;
  int64_t place; // of this rank's points
};

/// Points of this rank that will be on ranks [begin, end).
struct Part {
  int64_t begin;
  int64_t end;
  std::vector<Item> items;
  std::vector<double> weight_before; // of items in order, and of all

  int64_t middle() const {
    return begin + (end - begin) / 2;
  }
  double share() const {
    return static_cast<double>(middle() - begin) /
        static_cast<double>(end - begin);
  }
};

class Bisection {
 public:
  Bisection(const Bisected& given, const Mesh& mesh)
      : given_(given), mesh_(mesh) {
    Part all{0, mesh.ranks(), {}, {}};
    const auto* const rows = given.rows.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < given.rows.numel(); ++i) {
      all.items.push_back({0, rows[i], i});
    }
    parts_.push_back(std::move(all));
  }

  at::Tensor run() {
    while (has_several_ranks()) {
      order_parts();
      halve_parts();
    }
    auto owners = at::empty_like(given_.rows);
    for (const auto& part : parts_) {
      for (const auto& item : part.items) {
        owners.mutable_data_ptr<int64_t>()[item.place] = part.begin;
      }
    }
    return owners;
  }

 private:
  bool has_several_ranks() const {
    return std::any_of(parts_.begin(), parts_.end(), [](const Part& part) {
      return part.end - part.begin > 1;
    });
  }

  /// Over all ranks, elementwise.
  std::vector<double> reduced(const std::vector<double>& values, Reduce reduce)
      const {
    auto local = at::empty({static_cast<int64_t>(values.size())}, at::kDouble);
    std::copy(values.begin(), values.end(), local.mutable_data_ptr<double>());
    const auto all = reduce_numbers(local, reduce, mesh_.group()).contiguous();
    const auto* const data = all.const_data_ptr<double>();
    return {data, data + all.numel()};
  }

  /// Keys, the order by them, and the weights before each.
  void order_parts() {
    const auto dims = given_.codes.defined() ? Numbers() : widest_dims();
    const auto* const weights = given_.weights.const_data_ptr<double>();
    for (size_t i = 0; i < parts_.size(); ++i) {
      auto& part = parts_[i];
      for (auto& item : part.items) {
        item.key = key_of(item.place, dims.empty() ? 0 : dims[i]);
      }
      std::sort(
          part.items.begin(),
          part.items.end(),
          [](const auto& a, const auto& b) {
            return a.key != b.key ? a.key < b.key : a.row < b.row;
          });
      part.weight_before.assign(1, 0);
      for (const auto& item : part.items) {
        part.weight_before.push_back(
            part.weight_before.back() + weights[item.place]);
      }
    }
  }

  int64_t key_of(int64_t place, int64_t dim) const {
    if (given_.codes.defined()) {
      return given_.codes.const_data_ptr<int64_t>()[place];
    }
    const auto* const points = given_.points.const_data_ptr<double>();
    return ordered_bits(points[place * given_.points.size(1) + dim]);
  }

  Numbers widest_dims() const {
    const int64_t dims = given_.points.size(1);
    const auto* const points = given_.points.const_data_ptr<double>();
    std::vector<double> highs(parts_.size() * 2 * dims, -kInfinity);
    for (size_t i = 0; i < parts_.size(); ++i) {
      double* const high = highs.data() + i * 2 * dims; // and of the negative
      for (const auto& item : parts_[i].items) {
        for (int64_t dim = 0; dim < dims; ++dim) {
          const double value = points[item.place * dims + dim];
          high[dim] = std::max(high[dim], value);
          high[dims + dim] = std::max(high[dims + dim], -value);
        }
      }
    }
    highs = reduced(highs, Reduce::Max);
    Numbers widest;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const double* const high = highs.data() + i * 2 * dims;
      int64_t best = 0;
      for (int64_t dim = 1; dim < dims; ++dim) {
        if (high[dim] + high[dims + dim] > high[best] + high[dims + best]) {
          best = dim;
        }
      }
      widest.push_back(best);
    }
    return widest;
  }

  void halve_parts() {
    std::vector<double> totals;
    for (const auto& part : parts_) {
      totals.push_back(part.weight_before.back());
    }
    totals = reduced(totals, Reduce::Sum);
    for (size_t i = 0; i < parts_.size(); ++i) {
      totals[i] *= parts_[i].share();
    }
    const auto keys = largest_below(
        totals,
        std::numeric_limits<int64_t>::min(),
        std::numeric_limits<int64_t>::max(),
        [](size_t, const Item& item) { return item.key; });
    // Of the items of the key at which the weight is reached.
    const auto rows = largest_below(
        totals,
        0,
        std::numeric_limits<int64_t>::max(),
        [&](size_t part, const Item& item) {
          return item.key == keys[part] ? item.row
              : item.key < keys[part]   ? -1
                                        : std::numeric_limits<int64_t>::max();
        });
    split(keys, rows);
  }

  /// For each part the largest number such that the items with numbers below it
  /// weigh no more than `limits` says. `number` does not decrease along the
  /// items.
  template <class Number>
  Numbers largest_below(
      const std::vector<double>& limits,
      int64_t first,
      int64_t last,
      const Number& number) const {
    Numbers low(parts_.size(), first);
    Numbers high(parts_.size(), last);
    while (low != high) {
      Numbers tried;
      std::vector<double> weights;
      for (size_t i = 0; i < parts_.size(); ++i) {
        const int64_t middle = middle_of(low[i], high[i]);
        tried.push_back(middle < high[i] ? middle + 1 : middle);
        weights.push_back(weight_below(i, tried.back(), number));
      }
      weights = reduced(weights, Reduce::Sum);
      for (size_t i = 0; i < parts_.size(); ++i) {
        if (weights[i] <= limits[i]) {
          low[i] = tried[i];
        } else {
          high[i] = tried[i] - 1;
        }
      }
    }
    return low;
  }

  template <class Number>
  double weight_below(size_t i, int64_t bound, const Number& number) const {
    const auto& part = parts_[i];
    const auto end = std::partition_point(
        part.items.begin(), part.items.end(), [&](const Item& item) {
          return number(i, item) < bound;
        });
    return part.weight_before[end - part.items.begin()];
  }

  void split(const Numbers& keys, const Numbers& rows) {
    std::vector<Part> halves;
    for (size_t i = 0; i < parts_.size(); ++i) {
      auto& part = parts_[i];
      if (part.end - part.begin == 1) {
        halves.push_back(std::move(part));
        continue;
      }
      const auto middle = std::partition_point(
          part.items.begin(), part.items.end(), [&](const Item& item) {
            return item.key != keys[i] ? item.key < keys[i]
                                       : item.row < rows[i];
          });
      halves.push_back(
          {part.begin, part.middle(), {part.items.begin(), middle}, {}});
      halves.push_back(
          {part.middle(), part.end, {middle, part.items.end()}, {}});
    }
    parts_ = std::move(halves);
  }

  const Bisected& given_;
  const Mesh& mesh_;
  std::vector<Part> parts_;
};

} // namespace

at::Tensor bisect(const Bisected& given, const Mesh& mesh) {
  return Bisection(given, mesh).run();
}

} // namespace shardtensor::detail
