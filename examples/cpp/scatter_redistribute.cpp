// Rank 0 holds a tensor; it is scattered unevenly, then cut another way.
//
//     mpirun -n 2 scatter_redistribute
//
// Output on 2 ranks:
//
//     rank 0 received [64, 64], rank 1 received [36, 64]
//     Shard(0) to Shard(1): rank 0 holds [100, 32], rank 1 holds [100, 32]
//     and back, cut as before: rank 0 holds [64, 64], rank 1 holds [36, 64]
//     Every element arrived: true

#include <iostream>

#include <ATen/ATen.h>
#include <shardtensor/shardtensor.h>

using shardtensor::DistributedManager;
using shardtensor::Partition;
using shardtensor::Placement;

namespace {

/// Each rank takes 64 % of what is left, the last one the rest.
Partition uneven(int64_t extent, int64_t ranks) {
  std::vector<int64_t> sizes;
  for (int64_t rank = 0; rank + 1 < ranks; ++rank) {
    sizes.push_back(extent * 64 / 100);
    extent -= sizes.back();
  }
  sizes.push_back(extent);
  return Partition(sizes);
}

/// "rank 0 holds [64, 64], rank 1 holds [36, 64]".
std::string pieces(const at::Tensor& x, const char* verb) {
  const auto& spec = shardtensor::spec(x);
  std::ostringstream text;
  for (int64_t rank = 0; rank < spec->mesh()->ranks(); ++rank) {
    text << (rank ? ", " : "") << "rank " << rank << ' ' << verb << ' '
         << at::IntArrayRef(spec->local_sizes(rank));
  }
  return text.str();
}

} // namespace

int main() {
  DistributedManager::initialize();
  auto& manager = DistributedManager::get();
  const auto mesh = manager.initialize_mesh({-1}, {"domain"});

  const auto whole = at::arange(6400.0).reshape({100, 64});
  const auto rows = shardtensor::make_spec(
      mesh,
      {100, 64},
      {Placement::shard(0)},
      {uneven(100, manager.world_size()), std::nullopt});
  const auto mine =
      manager.rank() == 0 ? whole : at::empty({0}, whole.options());
  const auto x = shardtensor::scatter(mine, 0, rows);
  const auto columns = shardtensor::redistribute(x, {Placement::shard(1)});
  const auto back = shardtensor::redistribute(columns, rows);

  bool same = true;
  for (const auto& tensor : {x, columns, back}) {
    same = shardtensor::full_tensor(tensor).equal(whole) && same;
  }
  if (manager.rank() == 0) {
    std::cout << pieces(x, "received") << '\n'
              << "Shard(0) to Shard(1): " << pieces(columns, "holds") << '\n'
              << "and back, cut as before: " << pieces(back, "holds") << '\n'
              << std::boolalpha << "Every element arrived: " << same << '\n';
  }
  DistributedManager::cleanup(/*wait=*/true);
}
