// The shallow-water equations on the rotating Earth, by spherical harmonics:
// the solver of examples/python/shallow_water.py, the globe cut in latitude.
//
//     mpirun -n 2 build/examples/shallow_water [LATITUDES HOURS]
//
// The solver doesn't know whether its fields are sharded. Prints the root mean
// squares of the fields at the end and how far they are from one process's.

#include <cmath>
#include <iomanip>
#include <iostream>
#include <string>

#include <ATen/ATen.h>
#include <shardtensor/shardtensor.h>

#include "spherical_harmonics.h"

using at::Tensor;
using shardtensor::DistributedManager;
using shardtensor::MeshPtr;
using shardtensor::Placement;

namespace {

constexpr double kRadius = 6.37122e6; // m
constexpr double kOmega = 7.292e-5; // 1 / s
constexpr double kGeopotential = 9.80616 * 10e3; // of the mean depth, m^2 / s^2
constexpr double kStep = 600; // s

/// Geopotential, vorticity and divergence, (3, latitudes, longitudes) of a
/// Gauss grid, advanced by Runge and Kutta's fourth-order steps.
class ShallowWater {
 public:
  explicit ShallowWater(int64_t latitudes, const MeshPtr& mesh = nullptr)
      : ShallowWater(
            2 * latitudes / 3, // products of two fields are not aliased
            SphericalHarmonics(
                latitudes,
                2 * latitudes,
                2 * latitudes / 3,
                mesh)) {}

  Tensor advance(const Tensor& fields, int64_t steps) const {
    auto state = harmonics_.there(fields);
    for (int64_t step = 0; step < steps; ++step) {
      state = damping_ * advanced(state);
    }
    return harmonics_.back(state);
  }

 private:
  ShallowWater(int64_t modes, SphericalHarmonics harmonics)
      : harmonics_(std::move(harmonics)) {
    const auto degree = at::arange(modes, at::kDouble).unsqueeze(1);
    laplace_ = -degree * (degree + 1) / (kRadius * kRadius);
    inverse_ = at::where(degree > 0, 1 / laplace_.clamp_max(-1e-20), 0.0);
    damping_ = at::exp(-kStep / 7200 * (laplace_ / laplace_[-1]).pow(4));
    coriolis_ = 2 * kOmega * harmonics_.sines().unsqueeze(1);
  }

  Tensor advanced(const Tensor& state) const {
    const auto first = tendency(state);
    const auto second = tendency(state + kStep / 2 * first);
    const auto third = tendency(state + kStep / 2 * second);
    const auto fourth = tendency(state + kStep * third);
    return state + kStep / 6 * (first + 2 * second + 2 * third + fourth);
  }

  Tensor tendency(const Tensor& state) const {
    const auto fields = harmonics_.back(state);
    const auto geopotential = fields[0];
    const auto vorticity = fields[1];
    const auto wind = this->wind(state.narrow(0, 1, 2));
    const auto turned = curl_and_divergence(wind * (vorticity + coriolis_));
    const auto flux = curl_and_divergence(wind * geopotential);
    const auto energy =
        harmonics_.there(geopotential + wind.square().sum(0) / 2);
    return at::stack({-flux[1], -turned[1], turned[0] - laplace_ * energy}, 0);
  }

  Tensor wind(const Tensor& curl_and_divergence) const {
    return harmonics_.vector_back(inverse_ * curl_and_divergence / kRadius);
  }
  Tensor curl_and_divergence(const Tensor& wind) const {
    return laplace_ * kRadius * harmonics_.vector_there(wind);
  }

  SphericalHarmonics harmonics_;
  Tensor laplace_, inverse_, damping_, coriolis_;
};

/// A wave of the geopotential and one of the vorticity.
Tensor weather(int64_t latitudes) {
  const auto sine = gauss_grid(latitudes).sines.unsqueeze(1);
  const auto cosine = (1 - sine.square()).sqrt();
  const auto longitude =
      at::arange(2 * latitudes, at::kDouble) * (M_PI / latitudes);
  const auto high = cosine.square() * sine * (2 * longitude).cos();
  const auto waves = cosine.pow(4) * sine * (4 * longitude).cos();
  const auto vorticity = 2e-5 * sine + 3e-5 * waves;
  return at::stack(
      {kGeopotential * (1 + 0.02 * high),
       vorticity,
       1e-6 * cosine.pow(3) * (3 * longitude).sin()});
}

/// The tensor of rank 0, cut in latitude.
Tensor shard(const Tensor& fields, const MeshPtr& mesh) {
  const auto rows =
      shardtensor::make_spec(mesh, fields.sizes().vec(), {Placement::shard(1)});
  return shardtensor::scatter(fields, /*source=*/0, rows);
}

/// Relative to each field's largest value.
double largest_difference(const Tensor& a, const Tensor& b) {
  const auto scale = b.abs().amax({1, 2}, /*keepdim=*/true);
  return ((a - b).abs() / scale).max().item<double>();
}

void print_fields(const Tensor& fields) {
  std::cout << "geopotential, vorticity, divergence:" << std::scientific
            << std::setprecision(9);
  for (const auto& field : fields.unbind()) {
    std::cout << ' ' << field.square().mean().sqrt().item<double>();
  }
  std::cout << '\n';
}

} // namespace

int main(int argc, char** argv) {
  TORCH_CHECK(argc == 1 || argc == 3, "usage: shallow_water [LATITUDES HOURS]");
  const int64_t latitudes = argc == 3 ? std::stol(argv[1]) : 24;
  const int64_t hours = argc == 3 ? std::stol(argv[2]) : 6;
  const auto steps = static_cast<int64_t>(hours * 3600 / kStep);
  const at::NoGradGuard no_grad;
  DistributedManager::initialize();
  auto& manager = DistributedManager::get();
  const auto mesh = manager.initialize_mesh({-1}, {"latitude"});
  // Nothing is gathered.
  shardtensor::set_fallback_mode(shardtensor::FallbackMode::Error);

  const auto start = weather(latitudes);
  const auto end =
      ShallowWater(latitudes, mesh).advance(shard(start, mesh), steps);
  TORCH_CHECK(shardtensor::spec(end)->placement(0) == Placement::shard(1));
  const auto fields = shardtensor::full_tensor(end);
  if (manager.rank() == 0) {
    const auto single = ShallowWater(latitudes).advance(start, steps);
    std::cout << hours << " hours on " << mesh->ranks() << " ranks\n";
    print_fields(fields);
    std::cout << "largest difference from one process: "
              << largest_difference(fields, single) << '\n';
  }
  DistributedManager::cleanup(/*wait=*/true);
}
