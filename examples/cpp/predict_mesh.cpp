// The MeshGraphNet that examples/python/train_mesh.py has trained, at work on a
// mesh that is cut over the ranks.
//
//     python examples/python/train_mesh.py --save out/mesh.bin
//     mpirun -n 2 build/examples/predict_mesh out/mesh.bin
//
// Every rank owns the nodes of one region and the edges that end in them.
// Prints how far the heat that it predicts is from Python's.

#include <iostream>
#include <map>
#include <string>

#include <ATen/ATen.h>
#include <shardtensor/shardtensor.h>

#include "tensor_file.h"

using at::Tensor;
using shardtensor::DistributedManager;
using shardtensor::MeshPtr;
using shardtensor::Placement;
using Tensors = std::map<std::string, Tensor>;

namespace {

// ---- the model of mesh_graph_net.py
// -------------------------------------------

class MeshGraphNet {
 public:
  explicit MeshGraphNet(const Tensors& weights) : weights_(weights) {}

  Tensor predict(Tensor nodes, Tensor edges, const Tensor& edge_index) const {
    const auto source = edge_index[0];
    const auto target = edge_index[1];
    nodes = perceptron("encode_nodes", nodes);
    edges = perceptron("encode_edges", edges);
    for (int64_t i = 0; has(c10::str("processors.", i, ".edge.0.weight"));
         ++i) {
      const auto name = c10::str("processors.", i);
      const auto ends = at::cat(
          {edges, nodes.index_select(0, source), nodes.index_select(0, target)},
          1);
      edges = edges + perceptron(name + ".edge", ends);
      const auto sums = at::zeros_like(nodes).index_add(0, target, edges);
      nodes = nodes + perceptron(name + ".node", at::cat({nodes, sums}, 1));
    }
    return linear("decode.2", at::silu(linear("decode.0", nodes))).select(1, 0);
  }

 private:
  bool has(const std::string& name) const {
    return weights_.count("model." + name) > 0;
  }
  const Tensor& weight(const std::string& name) const {
    return weights_.at("model." + name);
  }
  Tensor linear(const std::string& name, const Tensor& x) const {
    return at::linear(x, weight(name + ".weight"), weight(name + ".bias"));
  }
  Tensor perceptron(const std::string& name, const Tensor& x) const {
    const auto y = linear(name + ".2", at::silu(linear(name + ".0", x)));
    const auto& scale = weight(name + ".3.weight");
    return at::layer_norm(
        y, scale.sizes(), scale, weight(name + ".3.bias"), 1e-5);
  }

  const Tensors& weights_;
};

// ---- the mesh
// -----------------------------------------------------------------

/// The tensor of rank 0, cut along `dim`.
Tensor shard(const Tensor& x, int64_t dim, const MeshPtr& mesh) {
  const auto layout =
      shardtensor::make_spec(mesh, x.sizes().vec(), {Placement::shard(dim)});
  return shardtensor::scatter(x, /*source=*/0, layout);
}

/// As in train_mesh.py: ways along edges and their lengths.
Tensor edge_features(const Tensor& points, const Tensor& edge_index) {
  const auto along = points.index_select(0, edge_index[0]) -
      points.index_select(0, edge_index[1]);
  const auto length = along.square().sum(1, /*keepdim=*/true).sqrt();
  return at::cat({along, length}, 1) / length.mean();
}

} // namespace

int main(int argc, char** argv) {
  TORCH_CHECK(argc == 2, "usage: predict_mesh FILE; train_mesh.py --save FILE");
  const at::NoGradGuard no_grad;
  DistributedManager::initialize();
  auto& manager = DistributedManager::get();
  const auto mesh = manager.initialize_mesh({-1}, {"domain"});
  const auto saved = read_tensors(argv[1]);

  const auto given = shard(saved.at("points"), 0, mesh);
  const auto [points, nodes] = shardtensor::partition_points(given, "rcb");
  const shardtensor::ShardGraph graph(
      shard(saved.at("edges"), 1, mesh), nodes, nodes);
  const auto before = shard(saved.at("before"), 0, mesh).index_select(0, nodes);
  const auto edges = edge_features(points, graph.edge_index());

  const MeshGraphNet model(saved);
  std::vector<Tensor> changes;
  for (int64_t field = 0; field < before.size(1); ++field) {
    changes.push_back(
        model.predict(before.narrow(1, field, 1), edges, graph.edge_index()));
  }
  const auto after = before + at::stack(changes, 1) * saved.at("scale");

  const auto expected =
      shard(saved.at("prediction"), 0, mesh).index_select(0, nodes);
  const auto difference =
      shardtensor::full_tensor((after - expected).abs().max());
  if (manager.rank() == 0) {
    std::cout << before.size(1) << " fields on " << mesh->ranks()
              << " ranks, largest difference from Python's heat: "
              << difference.item<double>() << '\n';
  }
  DistributedManager::cleanup(/*wait=*/true);
}
