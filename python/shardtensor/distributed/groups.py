"""Process groups under names."""

from collections.abc import Sequence

import torch.distributed as dist

from shardtensor.agree import known_everywhere, made_everywhere
from shardtensor.distributed.config import ProcessGroupConfig, ProcessGroupNode


class UndefinedGroupError(KeyError, ValueError):
    """A group or mesh axis that nobody has created."""

    def __init__(self, kind: str, name: str, known: Sequence[str]):
        super().__init__(name)
        known = ", ".join(known) or "none"
        self.message = f"no {kind} named {name!r}; there are: {known}"

    def __str__(self):
        return self.message


@known_everywhere
class GroupError(ValueError, RuntimeError, AssertionError):
    """A group that cannot be made. Of the kinds that this is: PhysicsNeMo's are
    AssertionErrors and ValueErrors."""


class NamedGroups:
    """What DistributedManager, whose base this is, knows of groups by name. An axis of
    its global mesh names one, too."""

    def _drop_groups(self):
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._group_ranks: dict[str, list[list[int]]] = {}

    @property
    def group_names(self) -> list[str]:
        return list(self._groups)

    def group(self, name: str | None = None) -> dist.ProcessGroup | None:
        """The named group, or this rank's group along the mesh axis of that
        name; None (torch's default group) for None."""
        if name is None:
            return None
        if name in self._groups:
            return self._groups[name]
        if name in self.mesh_dims:
            return self.global_mesh.get_group(name)
        raise UndefinedGroupError("group", name, [*self._groups, *self.mesh_dims])

    def group_size(self, name: str | None = None) -> int:
        if name is None:
            return self.world_size
        return dist.get_world_size(self.group(name))

    def group_rank(self, name: str | None = None) -> int:
        if name is None:
            return self.rank
        return dist.get_rank(self.group(name))

    def group_name(self, group: dist.ProcessGroup | None = None) -> str | None:
        """The name under which a group was created; None for the default."""
        if group is None:
            return None
        for name in [*self._groups, *self.mesh_dims]:
            if self.group(name) is group:
                return name
        raise UndefinedGroupError("group", str(group), self.group_names)

    @classmethod
    def create_process_subgroup(
        cls,
        name: str,
        size: int,
        group_name: str | None = None,
        verbose: bool = False,
        *,
        backend: str | None = None,
        pg_options=None,
    ) -> None:
        """Cuts the ranks (or each group called `group_name`) into groups of
        `size` consecutive ranks; `name` is then the one of this rank. `backend` and
        `pg_options` are new_group's."""
        manager = cls()
        parents = [list(range(manager.world_size))]
        if group_name is not None:
            parents = manager._ranks_of(group_name)

        def cut():
            if size < 1 or any(len(parent) % size for parent in parents):
                raise GroupError(
                    f"create_process_subgroup: groups of {size} do not divide the "
                    f"{len(parents[0])} ranks of {group_name or 'the job'}"
                )
            return [
                parent[begin : begin + size]
                for parent in parents
                for begin in range(0, len(parent), size)
            ]

        manager._create_groups(name, cut, verbose, backend, pg_options)

    @classmethod
    def create_orthogonal_process_group(
        cls,
        orthogonal_group_name: str,
        group_name: str,
        verbose: bool = False,
        *,
        backend: str | None = None,
        pg_options=None,
    ) -> None:
        """Groups that take one rank of each `group_name`: with groups [0, 1]
        and [2, 3] these are [0, 2] and [1, 3]. `backend` and `pg_options` are
        new_group's."""
        manager = cls()
        rows = manager._ranks_of(group_name)

        def columns():
            return [list(column) for column in zip(*rows, strict=True)]

        manager._create_groups(
            orthogonal_group_name, columns, verbose, backend, pg_options
        )

    @classmethod
    def create_group_from_node(
        cls, node: ProcessGroupNode, parent: str | None = None, verbose: bool = False
    ) -> str:
        """The groups of a node of a ProcessGroupConfig, `node.size` ranks each
        within every group called `parent`, and those orthogonal to them, whose
        name is returned."""
        if node.size is None:
            raise GroupError(f"create_group_from_node: {node.name!r} has no size")
        cls.create_process_subgroup(node.name, node.size, parent, verbose)
        orthogonal = f"__orthogonal_to_{node.name}"
        cls.create_orthogonal_process_group(orthogonal, node.name, verbose)
        return orthogonal

    @classmethod
    def create_groups_from_config(
        cls, config: ProcessGroupConfig, verbose: bool = False
    ) -> None:
        """The groups of every node of a tree, see ProcessGroupConfig. A mesh of
        several axes says the same in one call: initialize_mesh((-1, 2), ("data",
        "model"))."""
        cls.create_group_from_node(config.root, verbose=verbose)
        for node in config.breadth_first():
            parent = node.name
            for child in config.children(node.name):
                # Siblings are orthogonal: each cuts what the one before left.
                parent = cls.create_group_from_node(child, parent, verbose)

    def _ranks_of(self, name):
        if name not in self._group_ranks:
            raise UndefinedGroupError("group", name, list(self._group_ranks))
        return self._group_ranks[name]

    def _create_groups(self, name, cut, verbose, backend, pg_options):
        def new_ranks():
            if name in self._groups:
                raise GroupError(f"there is a group named {name!r} already")
            if not self.distributed:
                raise GroupError(
                    f"group {name!r}: this process was started without a launcher"
                )
            return cut()

        told = lambda ranks: f"group {name!r} over {backend}: {ranks}"  # noqa: E731
        ranks = made_everywhere(new_ranks, told)
        for members in ranks:
            group = dist.new_group(members, backend=backend, pg_options=pg_options)
            if self.rank in members:
                self._groups[name] = group
        self._group_ranks[name] = ranks
        if verbose and self.rank == 0:
            print(f"group {name!r}: {ranks}")
