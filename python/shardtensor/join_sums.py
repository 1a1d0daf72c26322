"""Gradients of parameters in a compiled backward: one all-reduce, not one each."""

import operator
from collections import defaultdict
from math import prod

import torch
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from shardtensor.graph_order import add_pass, is_communication


class JoinSums(CustomGraphPass):
    """All sums over the same ranks that no other message waits for, joined at
    the end of the graph. The same on all ranks: it looks at nothing that
    depends on the sizes of a piece."""

    def __call__(self, graph):
        sums = defaultdict(list)
        for node in graph.nodes:
            if _is_sum(node):
                value = node.meta["val"]
                sums[node.args[2], value.dtype, value.device].append(node)
        for nodes in sums.values():
            last = [node for node in nodes if _is_last_message(node)]
            if len(last) > 1:
                _join(graph, last)

    def uuid(self):
        return custom_graph_pass.get_hash_for_files((__file__,))


def install():
    add_pass("post_grad_custom_post_pass", JoinSums())


def _is_sum(node):
    return (
        node.target is torch.ops.shardtensor.all_reduce.default
        and node.args[1] == "sum"
        and all(isinstance(size, int) for size in node.meta["val"].shape)
    )


def _is_last_message(node):
    return not any(map(is_communication, _what_follows(node)))


def _what_follows(node):
    """Every node that needs this one, but the graph's output."""
    found, waiting = set(), [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                waiting.append(user)
    return found


def _join(graph, sums):
    following = set().union(*map(_what_follows, sums))
    end = graph.output_node()
    operators = torch.ops.aten
    with graph.inserting_before(end):
        flat = [_call(graph, operators.reshape, n.args[0], [-1]) for n in sums]
        joined = _call(graph, operators.cat, flat)
        total = graph.call_function(
            torch.ops.shardtensor.all_reduce.default, (joined, *sums[0].args[1:])
        )
        total.meta["val"] = joined.meta["val"]
        sizes = [prod(node.meta["val"].shape) for node in sums]
        parts = _call(graph, operators.split_with_sizes, total, sizes)
        results = []
        for index, node in enumerate(sums):
            part = graph.call_function(operator.getitem, (parts, index))
            part.meta["val"] = parts.meta["val"][index]
            shape = list(node.meta["val"].shape)
            results.append(_call(graph, operators.reshape, part, shape))
    for node in [node for node in graph.nodes if node in following]:
        end.prepend(node)
    for node, result in zip(sums, results, strict=True):
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _call(graph, packet, *args):
    node = graph.call_function(packet.default, args)
    values = torch.fx.map_arg(args, lambda arg: arg.meta["val"])
    example = values[0][0] if isinstance(values[0], (list, tuple)) else values[0]
    with example.fake_mode:
        node.meta["val"] = packet.default(*values)
    return node
