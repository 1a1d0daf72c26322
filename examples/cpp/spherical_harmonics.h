#pragma once

#include <cmath>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <shardtensor/shardtensor.h>

/// A Gauss grid of latitudes, north first.
struct GaussGrid {
  at::Tensor sines;
  at::Tensor weights; // their sum is 2
};

/// The zeros of the Legendre polynomial of degree n, by Newton's method.
inline GaussGrid gauss_grid(int64_t n) {
  std::vector<double> sines;
  std::vector<double> weights;
  for (int64_t i = 0; i < n; ++i) {
    double x = std::cos(M_PI * (i + 0.75) / (n + 0.5));
    double slope = 0;
    for (int iteration = 0; iteration < 100; ++iteration) {
      double before = 1;
      double value = x;
      for (int64_t degree = 2; degree <= n; ++degree) {
        before = std::exchange(
            value,
            ((2 * degree - 1) * x * value - (degree - 1) * before) / degree);
      }
      slope = n * (before - x * value) / (1 - x * x);
      const double step = value / slope;
      x -= step;
      if (std::abs(step) < 1e-15) {
        break;
      }
    }
    sines.push_back(x);
    weights.push_back(2 / ((1 - x * x) * slope * slope));
  }
  return {at::tensor(sines, at::kDouble), at::tensor(weights, at::kDouble)};
}

/// The orthonormal associated Legendre functions, (orders, degrees, sines).
inline at::Tensor legendre(int64_t modes, const at::Tensor& sines) {
  const auto count = sines.size(0);
  const auto result = at::zeros({modes, modes, count}, at::kDouble);
  auto p = result.accessor<double, 3>();
  const auto x = sines.accessor<double, 1>();
  for (int64_t k = 0; k < count; ++k) {
    const double cosine = std::sqrt((1 + x[k]) * (1 - x[k]));
    p[0][0][k] = std::sqrt(1 / (4 * M_PI));
    for (double l = 1; l < modes; ++l) {
      const auto i = static_cast<int64_t>(l);
      const double edge = p[i - 1][i - 1][k];
      p[i - 1][i][k] = std::sqrt(2 * l + 1) * x[k] * edge;
      p[i][i][k] = std::sqrt((2 * l + 1) / (2 * l)) * cosine * edge;
      for (int64_t j = 0; j + 1 < i; ++j) {
        const double m = j;
        const double ahead = (2 * l + 1) / ((l - m) * (l + m));
        p[j][i][k] = std::sqrt(ahead * (2 * l - 1)) * x[k] * p[j][i - 1][k] -
            std::sqrt(ahead * (l + m - 1) * (l - m - 1) / (2 * l - 3)) *
                p[j][i - 2][k];
      }
    }
  }
  return result;
}

/// Their derivatives by colatitude, and order times function over the cosine of
/// the latitude: what gradients are made of.
inline std::pair<at::Tensor, at::Tensor> legendre_gradients(
    int64_t modes,
    const at::Tensor& sines) {
  const auto p = legendre(modes + 1, sines);
  const auto south = at::zeros({modes, modes, sines.size(0)}, at::kDouble);
  const auto east = at::zeros_like(south);
  for (int64_t i = 0; i < modes; ++i) {
    const auto l = static_cast<double>(i);
    south[0][i] = -std::sqrt(l * (l + 1)) * p[1][i];
    for (int64_t j = 1; j <= i; ++j) {
      const auto m = static_cast<double>(j);
      south[j][i] = std::sqrt((l + m) * (l - m + 1)) / 2 * p[j - 1][i];
      south[j][i] -= std::sqrt((l - m) * (l + m + 1)) / 2 * p[j + 1][i];
      const auto sum = std::sqrt((l - m + 1) * (l - m + 2)) * p[j - 1][i + 1] +
          std::sqrt((l + m + 1) * (l + m + 2)) * p[j + 1][i + 1];
      east[j][i] = std::sqrt((2 * l + 1) / (2 * l + 3)) / 2 * sum;
    }
  }
  return {south, east};
}

/// Spherical harmonics of fields on a Gauss grid, (..., latitudes, longitudes)
/// to
/// (..., degrees, orders), both below `modes`. On a mesh the fields are cut in
/// latitude and the modes by order, and so are the Legendre functions: each
/// transform costs one exchange.
class SphericalHarmonics {
 public:
  /// Without a mesh, for plain tensors.
  SphericalHarmonics(
      int64_t latitudes,
      int64_t longitudes,
      int64_t modes,
      const shardtensor::MeshPtr& mesh = nullptr)
      : grid_(gauss_grid(latitudes)), longitudes_(longitudes), modes_(modes) {
    // Each rank computes those of its latitudes.
    const auto own = [&](const at::Tensor& rows) {
      return mesh ? shardtensor::to_local(
                        shardtensor::redistribute(
                            shardtensor::promote(rows, mesh),
                            {shardtensor::Placement::shard(0)}))
                  : rows;
    };
    const auto place = [&](const at::Tensor& x) {
      const auto matrix = x.to(at::kComplexDouble);
      if (!mesh) {
        return matrix;
      }
      const auto by_latitude = shardtensor::make_spec(
          mesh, {modes, modes, latitudes}, {shardtensor::Placement::shard(2)});
      return shardtensor::redistribute(
          shardtensor::from_local(matrix, by_latitude),
          {shardtensor::Placement::shard(0)});
    };
    const auto sines = own(grid_.sines);
    const auto weights = own(grid_.weights);
    const auto values = legendre(modes, sines);
    const auto [south, east] = legendre_gradients(modes, sines);
    const auto degree = at::arange(modes, at::kDouble).unsqueeze(1);
    const auto norm = weights / (degree * (degree + 1)).clamp_min(1);
    back_ = place(values);
    there_ = place(values * weights);
    vector_back_ = {place(south), place(east)};
    vector_there_ = {place(south * norm), place(-east * norm)};
  }

  const at::Tensor& sines() const {
    return grid_.sines;
  }

  at::Tensor there(const at::Tensor& fields) const {
    return at::einsum(kThere, {by_order(fields), there_});
  }
  at::Tensor back(const at::Tensor& modes) const {
    return on_grid(at::einsum(kBack, {modes, back_}));
  }

  /// Of vectors (..., 2, latitudes, longitudes), southward and eastward: the
  /// potentials whose gradient and whose turned gradient they are the sum of.
  at::Tensor vector_there(const at::Tensor& vectors) const {
    return contract(kThere, by_order(vectors), vector_there_);
  }
  at::Tensor vector_back(const at::Tensor& potentials) const {
    return on_grid(contract(kBack, potentials, vector_back_));
  }

 private:
  static constexpr auto kThere = "...km,mlk->...lm";
  static constexpr auto kBack = "...lm,mlk->...km";
  using Gradients = std::pair<at::Tensor, at::Tensor>;

  at::Tensor by_order(const at::Tensor& fields) const {
    const auto lines = at::fft_rfft(fields, std::nullopt, -1, "forward");
    const auto orders = 2 * M_PI * lines.narrow(-1, 0, modes_);
    return shardtensor::is_shard_tensor(orders)
        ? shardtensor::redistribute(
              orders, {shardtensor::Placement::shard(orders.dim() - 1)})
        : orders;
  }
  at::Tensor on_grid(const at::Tensor& orders) const {
    return at::fft_irfft(orders, longitudes_, -1, "forward");
  }

  static at::Tensor contract(
      const char* equation,
      const at::Tensor& x,
      const Gradients& gradients) {
    const c10::complex<double> i(0, 1);
    const auto& [south, east] = gradients;
    const auto first = x.select(-3, 0);
    const auto second = x.select(-3, 1);
    const auto sum = [&](const at::Tensor& a, const at::Tensor& b) {
      return at::einsum(equation, {a, south}) +
          i * at::einsum(equation, {b, east});
    };
    return at::stack({sum(first, second), sum(-second, first)}, -3);
  }

  GaussGrid grid_;
  int64_t longitudes_;
  int64_t modes_;
  at::Tensor there_, back_;
  Gradients vector_there_, vector_back_;
};
