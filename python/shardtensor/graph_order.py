"""Communication in the order in which it was traced, which is that of all ranks."""

from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from shardtensor.compile import communicates


class NoteOrder(CustomGraphPass):
    """Numbers the messages of a graph as it was traced."""

    def __call__(self, graph):
        for place, node in enumerate(filter(is_communication, graph.nodes)):
            node.meta["place_of_message"] = place

    def uuid(self):
        return custom_graph_pass.get_hash_for_files((__file__,))


class RestoreOrder(CustomGraphPass):
    """Puts messages of forward back in order. A graph without backward has nodes
    moved to those that use them, and on a rank whose piece is empty others may."""

    def __call__(self, graph):
        places = {
            node: node.meta["place_of_message"]
            for node in graph.nodes
            if "place_of_message" in node.meta
            and not node.meta.get("autograd_backward")
        }
        wanted = sorted(places, key=places.get)
        if wanted != list(places):
            _put_in_order(graph, wanted)

    def uuid(self):
        return custom_graph_pass.get_hash_for_files((__file__,))


def install():
    add_pass("joint_custom_post_pass", NoteOrder())
    add_pass("post_grad_custom_pre_pass", RestoreOrder())


def add_pass(place, graph_pass):
    """Adds it to those that inductor runs. A user's own are kept."""
    passes = getattr(config, place)
    if passes is None:
        setattr(config, place, graph_pass)
    elif hasattr(custom_graph_pass, "get_custom_graph_passes"):  # takes several
        known = custom_graph_pass.get_custom_graph_passes(passes)
        setattr(config, place, (*known, graph_pass))


def is_communication(node):
    namespace = getattr(node.target, "namespace", None)
    if namespace == "shardtensor":
        return communicates(node.target)
    return namespace in ("_c10d_functional", "c10d_functional", "c10d")


def _put_in_order(graph, wanted):
    """Each of the wanted, after what it needs, and then all others."""
    end = graph.output_node()
    placed = dict.fromkeys(graph.find_nodes(op="placeholder"))
    for node in wanted:
        waiting = [node]
        while waiting:
            missing = [n for n in waiting[-1].all_input_nodes if n not in placed]
            waiting += missing
            if not missing:
                placed[waiting.pop()] = None
    others = [node for node in graph.nodes if node not in placed and node is not end]
    for node in (*placed, *others):
        end.prepend(node)
