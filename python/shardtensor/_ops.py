"""The library's operators on local tensors, as torch.compile knows them."""

import torch

from shardtensor import _C  # noqa: F401  loads them

all_reduce = torch.ops.shardtensor.all_reduce
all_gather_v = torch.ops.shardtensor.all_gather_v
all_to_all_v = torch.ops.shardtensor.all_to_all_v
broadcast = torch.ops.shardtensor.broadcast
fused_all_reduce = torch.ops.shardtensor.fused_all_reduce
gather_v = torch.ops.shardtensor.gather_v
indexed_all_to_all_v = torch.ops.shardtensor.indexed_all_to_all_v
copy_to_parallel_region = torch.ops.shardtensor.copy_to_parallel_region
gather_from_parallel_region = torch.ops.shardtensor.gather_from_parallel_region
reduce_from_parallel_region = torch.ops.shardtensor.reduce_from_parallel_region
scatter_to_parallel_region = torch.ops.shardtensor.scatter_to_parallel_region
reduce_loss = torch.ops.shardtensor.reduce_loss
reduce_scatter_v = torch.ops.shardtensor.reduce_scatter_v
scatter_v = torch.ops.shardtensor.scatter_v
ring_step = torch.ops.shardtensor.ring_step
apply_mass = torch.ops.shardtensor.apply_mass
apply_stiffness = torch.ops.shardtensor.apply_stiffness
cell_centered_gradients = torch.ops.shardtensor.cell_centered_gradients
cell_centers = torch.ops.shardtensor.cell_centers
cell_edges = torch.ops.shardtensor.cell_edges
cell_faces = torch.ops.shardtensor.cell_faces
cell_gradients = torch.ops.shardtensor.cell_gradients
cell_measures = torch.ops.shardtensor.cell_measures
cell_normals = torch.ops.shardtensor.cell_normals
merge_corners = torch.ops.shardtensor.merge_corners
check_cells = torch.ops.shardtensor.check_cells
devoxelize = torch.ops.shardtensor.devoxelize
ball_query = torch.ops.shardtensor.ball_query
farthest_point_sampling = torch.ops.shardtensor.farthest_point_sampling
grid_subsample = torch.ops.shardtensor.grid_subsample
halo_padding = torch.ops.shardtensor.halo_padding
pad_sphere = torch.ops.shardtensor.pad_sphere
interpolate_neighbors = torch.ops.shardtensor.interpolate_neighbors
knn = torch.ops.shardtensor.knn
partition_points = torch.ops.shardtensor.partition_points
radius_search = torch.ops.shardtensor.radius_search
signed_distance_field = torch.ops.shardtensor.signed_distance_field
voxelize = torch.ops.shardtensor.voxelize
neighborhood_attention = torch.ops.shardtensor.neighborhood_attention
