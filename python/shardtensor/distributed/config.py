"""Trees of process groups, for DistributedManager.create_groups_from_config."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod


@dataclass
class ProcessGroupNode:
    """A name and how many ranks each group of that name has; None: see
    ProcessGroupConfig.update_parent_sizes."""

    name: str
    size: int | None = None


class ProcessGroupConfig:
    """Groups inside groups, as a tree with the root `node`. A node's first
    child cuts the node's groups; each further child takes one rank of each
    group of the child before, so that siblings are orthogonal.

        config = ProcessGroupConfig(ProcessGroupNode("world"))
        config.add_node(ProcessGroupNode("model", 2), parent="world")
        config.add_node(ProcessGroupNode("data", 2), parent="world")
        config.update_parent_sizes()  # world: 4
        # 4 ranks: model [0, 1] [2, 3], data [0, 2] [1, 3]
    """

    def __init__(self, node: ProcessGroupNode):
        self.root = node
        self.root_id = node.name
        self._nodes = {node.name: node}
        self._children: dict[str, list[str]] = {node.name: []}

    def add_node(self, node: ProcessGroupNode, parent: str | ProcessGroupNode) -> None:
        """Adds `node` as the last child of `parent`, a node of the tree or its
        name."""
        parent = parent.name if isinstance(parent, ProcessGroupNode) else parent
        if node.name in self._nodes:
            raise ValueError(f"add_node: there is a node named {node.name!r} already")
        self._children[self.get_node(parent).name].append(node.name)
        self._nodes[node.name] = node
        self._children[node.name] = []

    def get_node(self, name: str) -> ProcessGroupNode:
        if name not in self._nodes:
            known = ", ".join(self._nodes)
            raise ValueError(f"no node is named {name!r}; there are: {known}")
        return self._nodes[name]

    def children(self, name: str) -> list[ProcessGroupNode]:
        """In the order in which they were added."""
        return [self._nodes[child] for child in self._children[name]]

    def breadth_first(self) -> Iterator[ProcessGroupNode]:
        """Every node, parents before children."""
        level = [self.root]
        while level:
            yield from level
            level = [child for node in level for child in self.children(node.name)]

    def leaf_groups(self) -> list[str]:
        """The names of the nodes without children."""
        return [name for name in self._nodes if not self._children[name]]

    def set_leaf_group_sizes(
        self, group_sizes: Mapping[str, int], update_parent_sizes: bool = True
    ) -> None:
        """{leaf: ranks}; then update_parent_sizes() unless told otherwise."""
        leaves = self.leaf_groups()
        for name, size in group_sizes.items():
            if name not in leaves:
                raise AssertionError(
                    f"set_leaf_group_sizes: {name!r} is none of the leaves {leaves}"
                )
            self._nodes[name].size = size
        if update_parent_sizes:
            self.update_parent_sizes()

    def update_parent_sizes(self, verbose: bool = False) -> int:
        """Gives every parent the product of its children's sizes; the root's
        is returned."""
        for node in reversed(list(self.breadth_first())):
            children = self.children(node.name)
            if children:
                node.size = prod(child.size for child in children)
                if verbose:
                    print(f"group {node.name!r}: {node.size} ranks")
            elif node.size is None:
                raise AssertionError(f"update_parent_sizes: {node.name!r} has no size")
        return self.root.size
