// Every operator that the library adds to PyTorch. Kernels are registered in
// the files that define them. One that sends messages takes `group`, where they
// go, and no other does: so torch.compile knows which ones it must not move.
#include <torch/library.h>

TORCH_LIBRARY(shardtensor, m) {
  // Moves boxes between ranks. `code`: see comm/primitives/exchange_code.h.
  m.def(
      "exchange(Tensor x, int[] code, str group) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // `reduce`: sum, avg, product, max or min.
  m.def(
      "all_reduce(Tensor x, str reduce, str group) -> Tensor",
      {at::Tag::pt2_compliant_tag});

  // What the functions of these names call inside of torch.func's transforms,
  // with the place of a spec: see tensor/transformed.h.
  m.def("_to_local(Tensor x, int spec) -> Tensor");
  m.def("_from_local(Tensor local, int spec) -> Tensor");
  m.def("_redistribute(Tensor x, int spec) -> Tensor");

  // For graphs: see Note [Indices out of bounds].
  m.def(
      "check_bounds(Tensor extremes, int lowest, int extent, int dim, str op, "
      "str group) -> Tensor");

  // Uneven collectives, in terms of exchange: see collectives/collectives_v.h.
  m.def("all_gather_v(Tensor x, int dim, int[] sizes, str group) -> Tensor");
  m.def(
      "reduce_scatter_v(Tensor x, int dim, int[] sizes, str group) -> Tensor");
  m.def(
      "all_to_all_v(Tensor x, int dim, int[] in_splits, int[] out_splits, "
      "str group) -> Tensor");
  m.def(
      "gather_v(Tensor x, int dim, int[] sizes, int dst, str group) -> Tensor");
  m.def(
      "scatter_v(Tensor x, int dim, int[] sizes, int src, str group) -> Tensor");
  m.def(
      "indexed_all_to_all_v(Tensor x, int dim, Tensor[] indices, "
      "int[] out_splits, str group) -> Tensor");
  m.def("broadcast(Tensor x, int src, str group) -> Tensor");
  // Many values in one message: see collectives/fused_all_reduce.h.
  m.def(
      "fused_all_reduce(Tensor[] tensors, str reduce, str group, *, "
      "ScalarType? buffer_dtype=None, Device? device=None) -> Tensor[]");
  m.def("reduce_loss(Tensor loss, int dst, bool mean, str group) -> Tensor");
  // Regions in which ranks share work: see collectives/parallel_regions.h.
  m.def("copy_to_parallel_region(Tensor(a) x, str group) -> Tensor(a)");
  m.def("reduce_from_parallel_region(Tensor x, str group) -> Tensor");
  m.def(
      "scatter_to_parallel_region(Tensor x, int dim, int[] sizes, str group) "
      "-> Tensor");
  m.def(
      "gather_from_parallel_region(Tensor x, int dim, int[] sizes, str group) "
      "-> Tensor");
  // The next rank's tensor, and the neighbours' rows: see collectives/ring.h
  // and halo/halo_padding.h.
  m.def(
      "ring_step(Tensor x, int step, int[] receive_sizes, str group) -> Tensor");
  m.def(
      "halo_padding(Tensor x, int dim, int width, int edge_padding, str group) "
      "-> Tensor");
  // Around a sphere, of plain tensors and ShardTensors: see halo/sphere.h.
  m.def(
      "pad_sphere(Tensor x, int[2] width, int[2] dims=[-2, -1], *, "
      "bool vector=False, bool pole_rows=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});

  // A convolution that computes while its messages travel, and its gradients,
  // those that are wanted: see rules/stencil/conv_overlap_op.h. `code` holds
  // parameters and edges, the others the exchange.
  m.def(
      "conv_overlap(Tensor x, Tensor weight, Tensor? bias, int[] code, "
      "int[] bring_slab, str group) -> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv_overlap_backward(Tensor grad, Tensor x, Tensor slab, Tensor weight, "
      "bool[3] wanted, int[] code, int[] return_slab, str group) -> Tensor[]",
      {at::Tag::pt2_compliant_tag});

  // Attention to keys of other ranks, and the gradients of query, key, value
  // and, where wanted, mask: see rules/attention/work.h. `code` holds the rest.
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, "
      "int[] code, float scale, float dropout, Tensor? dropout_key, str group) "
      "-> Tensor[]",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, "
      "Tensor? mask, Tensor output, Tensor log_sum, bool wants_mask, "
      "int[] code, float scale, float dropout, Tensor? dropout_key, str group) "
      "-> Tensor[]",
      {at::Tag::pt2_compliant_tag});

  // Neighbours in clouds of points: see rules/points/points.h. On ShardTensors
  // these communicate above autograd; a compiler sees what they call there.
  m.def(
      "knn(Tensor points, Tensor queries, int k) "
      "-> (Tensor indices, Tensor distances)");
  m.def(
      "radius_search(Tensor points, Tensor queries, float radius, "
      "int? max_points=None, bool return_dists=False, "
      "bool return_points=False, ScalarType? index_dtype=None, "
      "bool return_counts=False) -> Tensor[]");
  // What a compiler sees of them, of pieces: see rules/points/nearest_op.h.
  m.def(
      "_nearest(Tensor points, Tensor queries, int most, float? radius, "
      "int[] pieces, str op, str everybody, str group) "
      "-> (Tensor rows, Tensor squares)",
      {at::Tag::pt2_compliant_tag});
  // See rules/points/interpolate.h.
  m.def(
      "interpolate_neighbors(Tensor points, Tensor values, Tensor queries, "
      "int k=3, float power=2) -> Tensor");
  // See rules/points/sampling.h.
  m.def(
      "farthest_point_sampling(Tensor points, int count, int start=0) "
      "-> Tensor");
  m.def(
      "ball_query(Tensor points, Tensor queries, float radius, "
      "int max_points) -> (Tensor indices, Tensor counts)");
  // See rules/points/partition.h.
  m.def(
      "partition_points(Tensor points, str method, Tensor? weights=None, "
      "Tensor? owners=None) -> (Tensor points, Tensor permutation)");
  // See rules/points/signed_distance.h and voxels.h.
  m.def(
      "signed_distance_field(Tensor mesh_vertices, Tensor mesh_indices, "
      "Tensor input_points, float max_dist=1e8, "
      "bool use_sign_winding_number=False) "
      "-> (Tensor distances, Tensor nearest, Tensor faces)");
  m.def(
      "voxelize(Tensor points, Tensor values, float[] low, float[] high, "
      "int[] shape, str reduce='mean') -> Tensor");
  m.def(
      "devoxelize(Tensor voxels, Tensor points, float[] low, float[] high, "
      "str mode='linear') -> Tensor");
  m.def(
      "grid_subsample(Tensor points, float size, Tensor? values=None) "
      "-> (Tensor points, Tensor values, Tensor counts, Tensor voxels, "
      "Tensor entries)");

  // Meshes of cells: see cells/elements.h, topology.h, centered.h.
  m.def("check_cells(Tensor points, Tensor cells, str kind) -> ()");
  m.def("cell_measures(Tensor points, Tensor cells, str kind) -> Tensor");
  m.def("cell_centers(Tensor points, Tensor cells, str kind) -> Tensor");
  m.def(
      "cell_normals(Tensor points, Tensor cells, str kind, "
      "bool weighted=False) -> Tensor");
  m.def(
      "cell_gradients(Tensor points, Tensor cells, str kind, Tensor values, "
      "str method='green_gauss') -> Tensor");
  m.def(
      "cell_centered_gradients(Tensor points, Tensor[] cells, str[] kinds, "
      "Tensor faces, Tensor sides, Tensor values, "
      "str method='least_squares', Tensor? boundary_values=None) -> Tensor");
  m.def(
      "apply_mass(Tensor points, Tensor cells, str kind, Tensor values, "
      "Tensor? coefficients=None) -> Tensor");
  m.def(
      "apply_stiffness(Tensor points, Tensor cells, str kind, Tensor values, "
      "Tensor? coefficients=None) -> Tensor");
  m.def("cell_edges(Tensor[] cells, str[] kinds, int points) -> Tensor");
  m.def(
      "cell_faces(Tensor[] cells, str[] kinds, int points) "
      "-> (Tensor faces, Tensor cells)");
  m.def("merge_corners(Tensor corners) -> (Tensor points, Tensor cells)");

  // Neighbourhood attention, of a piece, and its gradients: see
  // neighborhood.h and op.h of rules/neighborhood. `code` holds the dims of the
  // domain and the piece's queries.
  m.def(
      "neighborhood_attention(Tensor query, Tensor key, Tensor value, "
      "int[1] kernel_size, int[1] dilation=1, int[1] stride=1, "
      "bool[] is_causal=[False], float? scale=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_neighborhood_attention(Tensor query, Tensor key, Tensor value, "
      "int[] code, float scale) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_neighborhood_attention_backward(Tensor grad, Tensor query, Tensor key, "
      "Tensor value, Tensor output, Tensor log_sum, int[] code, float scale) "
      "-> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  // NATTEN's, on whole domains; without results where it cannot.
  m.def(
      "_natten_attention(Tensor query, Tensor key, Tensor value, int[] kernel, "
      "int[] dilation, int[] stride, bool[] causal, float scale) -> Tensor[]");
  m.def(
      "_natten_attention_backward(Tensor grad, Tensor query, Tensor key, "
      "Tensor value, int[] kernel, int[] dilation, int[] stride, "
      "bool[] causal, float scale) -> Tensor[]");

  // Random numbers of a piece: see rules/random/counter_numbers.h.
  m.def(
      "counter_numbers(Tensor key, int[] sizes, ScalarType dtype, int kind, "
      "float[] parameters, int[] integers, int[] index_sizes, "
      "int[] index_strides, int index_offset) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "counter_samples(int sample, Tensor a, Tensor b, Tensor key, "
      "int[] index_sizes, int[] index_strides, int index_offset) -> Tensor",
      {at::Tag::pt2_compliant_tag});

  // Values that a plan knows, as a tensor on like's device.
  m.def(
      "index_tensor(int[] values, Tensor like) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "weight_tensor(float[] values, Tensor like) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
