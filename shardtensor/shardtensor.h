#pragma once

// Everything that a C++ program needs, in reading order. Each header stands
// alone, too: programs with a few calls compile faster with fewer of them.

#include "shardtensor/version.h" // SHARDTENSOR_VERSION_MAJOR, ...

// The job: rank, device, process groups.
#include "shardtensor/distributed/launch.h"
#include "shardtensor/distributed/manager.h"

// Where the elements are.
#include "shardtensor/layout/mesh.h"
#include "shardtensor/layout/partition.h"
#include "shardtensor/layout/placement.h"
#include "shardtensor/layout/shard_spec.h"

// Sharded tensors: operators of PyTorch work on them as on any tensor.
#include "shardtensor/tensor/create.h"
#include "shardtensor/tensor/gradients/gradient_readers.h"
#include "shardtensor/tensor/gradients/parameter_gradients.h"
#include "shardtensor/tensor/infer_spec.h"
#include "shardtensor/tensor/random.h"
#include "shardtensor/tensor/scatter.h"
#include "shardtensor/tensor/shard_tensor.h"

// Communication on local tensors, differentiable.
#include "shardtensor/collectives/collectives_v.h"
#include "shardtensor/collectives/fused_all_reduce.h"
#include "shardtensor/collectives/parallel_regions.h"
#include "shardtensor/collectives/ring.h"
#include "shardtensor/collectives/shared_parameters.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/halo/halo_exchange.h"
#include "shardtensor/halo/halo_padding.h"
#include "shardtensor/halo/sphere.h"

// Attention: to neighbours; how it communicates.
#include "shardtensor/rules/attention/transport.h"
#include "shardtensor/rules/neighborhood/neighborhood.h"

// Convolutions: when they communicate beside their work.
#include "shardtensor/rules/stencil/overlap_bytes.h"

// Clouds of points.
#include "shardtensor/rules/points/interpolate.h"
#include "shardtensor/rules/points/partition.h"
#include "shardtensor/rules/points/points.h"
#include "shardtensor/rules/points/sampling.h"
#include "shardtensor/rules/points/signed_distance.h"
#include "shardtensor/rules/points/subsample.h"
#include "shardtensor/rules/points/transport.h"
#include "shardtensor/rules/points/voxels.h"

// Meshes of points and cells.
#include "shardtensor/cells/centered.h"
#include "shardtensor/cells/corners.h"
#include "shardtensor/cells/elements.h"
#include "shardtensor/cells/topology.h"

// Graphs.
#include "shardtensor/graph/shard_graph.h"

// Rules for operators of your own.
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/rule.h"
#include "shardtensor/rules/index/rules.h"
