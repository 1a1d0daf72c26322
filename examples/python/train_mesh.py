"""Trains a MeshGraphNet that predicts how heat flows on the cortex, a real surface
mesh of 10242 nodes cut into a piece for each rank, and compares with one process.
The truth is integrated here, too (mesh_data.py); some fields are held out.

    make demo-mesh                               # 2 ranks
    make demo-mesh RANKS=4 ARGS="--width 64"
    make demo-mesh LAUNCH="mpirun -n 2 .venv/bin/python"     # over MPI

With --save FILE, examples/cpp/predict_mesh.cpp predicts with the trained model, too.

or with any launcher: torchrun --nproc-per-node 2 train_mesh.py. The model
(mesh_graph_net.py) does not know that nodes and edges are sharded.
"""

import argparse

import mesh_data
import mesh_report
import report
import tensor_file
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import (
    device_of_one_process,
    gather,
    in_one_process,
    make_mesh,
    reference,
    train_showing,
)
from mesh_graph_net import MeshGraphNet

from shardtensor import Shard, ShardGraph, partition_nodes, scatter_tensor
from shardtensor.distributed import DistributedManager


def main():
    args = parse()
    if args.reference:
        device = device_of_one_process()
        reference(args, HeatFlow(args, *(x.to(device) for x in load(args))))
        return
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = make_mesh(manager, args.mesh)
    graph, points, heat = load_sharded(args, mesh)
    halos = gather(len(graph.halo_nodes), mesh)
    pieces = gather(graph.nodes.to_local().cpu(), mesh)
    first = manager.rank == 0
    if first:
        nodes = [len(piece) for piece in pieces]
        report.console.print(f"nodes {nodes}, and of others' {halos}")
    job = HeatFlow(args, graph.edge_index, points, heat)
    run = train_showing(args, job, f"{mesh.size()} ranks", first)
    prediction = run.prediction.full_tensor().cpu()
    scale = job.scale.full_tensor().cpu().reshape(1)
    run.prediction = None
    runs = gather(run, mesh)
    DistributedManager.cleanup()
    if first:
        in_file_order = torch.empty_like(prediction)
        in_file_order[torch.cat(pieces)] = prediction
        if args.save:
            save(args, job.model, scale, in_file_order)
        show(args, runs, pieces, in_file_order)


def parse():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--mesh", help="ranks per axis of their mesh, as in 2x2; default: one axis")
    add("--steps", type=int, default=100)
    add("--fields", type=int, default=64, help="to learn from")
    add("--width", type=int, default=32)
    add("--depth", type=int, default=5, help="steps of the processor")
    add("--learning-rate", type=float, default=4e-3)
    add("--seed", type=int, default=0)
    add("--picture", default="out/mesh.png")
    add("--curves", default="out/mesh_training.png", help="losses and memory")
    add("--save", metavar="FILE", help="what examples/cpp/predict_mesh reads")
    add("--no-compare", action="store_true", help="skip the run on one process")
    add("--reference", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


def load(args):
    """Edges, nodes and heat of the whole mesh."""
    points, faces = mesh_data.surface()
    return mesh_data.edges(faces), points, load_heat(args)


def load_heat(args):
    return mesh_data.heat_flow(args.fields + mesh_data.UNSEEN, args.seed)


def load_sharded(args, mesh):
    """Rank 0 reads and integrates; every rank receives some rows, then those of its
    own nodes, and the edges that end in them."""
    edges, points, heat = load(args) if dist.get_rank() == 0 else [None] * 3

    def scatter(tensor, dim, shape, dtype=torch.float32):
        placements = [Shard(dim)] * mesh.ndim
        return scatter_tensor(tensor, 0, mesh, placements, shape, dtype)

    fields = args.fields + mesh_data.UNSEEN
    edges = scatter(edges, 1, (2, mesh_data.EDGES), torch.int64)
    points = scatter(points, 0, (mesh_data.NODES, 3))
    heat = scatter(heat, 1, (2, mesh_data.NODES, fields))
    nodes = partition_nodes(mesh, points=points)
    return ShardGraph(edges, nodes), points[nodes], heat[:, nodes]


class HeatFlow:
    """A job of training.py. Nothing here knows whether the mesh is sharded."""

    def __init__(self, args, edge_index, points, heat):
        self.args, self.device = args, heat.device
        self.edge_index, self.points, self.heat = edge_index, points, heat
        self.before, self.after = heat[0], heat[1]
        along = points[edge_index[0]] - points[edge_index[1]]
        length = along.square().sum(1, keepdim=True).sqrt()
        self.edges = torch.cat([along, length], dim=1) / length.mean()
        self.scale = (self.after - self.before).square().mean().sqrt()

    def warm_up(self):
        """One step of a model of its own: what a process loads and opens with its
        first step is no part of training."""
        few = argparse.Namespace(**{**vars(self.args), "depth": 1})
        first = HeatFlow(few, self.edge_index, self.points, self.heat)
        first.start()
        first.step(0)

    def start(self):
        torch.manual_seed(self.args.seed)
        model = MeshGraphNet(1, self.edges.shape[1], self.args.width, self.args.depth)
        self.model = model.to(self.device)
        self.order = torch.Generator().manual_seed(self.args.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95))
        return self.optimizer

    def step(self, number):
        field = torch.randint(self.args.fields, (), generator=self.order).item()
        change = (self.after[:, field] - self.before[:, field]) / self.scale
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.change(field), change)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def change(self, field):
        """In units of the usual change."""
        given = self.before[:, field : field + 1]
        return self.model(given, self.edges, self.edge_index)

    @torch.no_grad()
    def predict(self):
        """The heat after the flow, of the unseen fields."""
        unseen = range(self.args.fields, self.args.fields + mesh_data.UNSEEN)
        changes = torch.stack([self.change(field) for field in unseen], dim=1)
        return self.before[:, self.args.fields :] + changes * self.scale


def save(args, model, scale, prediction):
    """The trained model, the mesh and what it predicts there."""
    edges, points, heat = load(args)
    weights = model.state_dict().items()
    tensors = {f"model.{name}": weight.cpu() for name, weight in weights}
    tensors |= {"points": points, "edges": edges, "before": heat[0, :, args.fields :]}
    tensor_file.write(args.save, tensors | {"scale": scale, "prediction": prediction})


def show(args, runs, pieces, prediction):
    single = None if args.no_compare else in_one_process(len(runs))
    if single is not None:
        report.show_losses(runs[0], single)
    report.show_costs(runs, [], single)
    heat, order = load_heat(args), torch.cat(pieces)
    owners = torch.empty_like(order)
    for rank, piece in enumerate(pieces):
        owners[piece] = rank
    mesh_report.show_errors(heat, prediction)
    mesh_report.draw(args.picture, heat, prediction, owners)
    report.draw_curves(args.curves, runs, single)


if __name__ == "__main__":
    main()
