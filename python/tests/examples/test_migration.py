"""docs/migration.md names what exists."""

import importlib
import re

import pytest
from programs import ROOT

import shardtensor
from shardtensor import distributed

PAGE = (ROOT / "docs" / "migration.md").read_text()
NAMES = sorted(set(re.findall(r"`(?:isinstance\(x, )?(shardtensor(?:\.\w+)*)", PAGE)))


def find(name):
    """A module, or what is in one, or in a class."""
    found, (_, *parts) = shardtensor, name.split(".")
    for at, part in enumerate(parts):
        if not hasattr(found, part):
            importlib.import_module(".".join(["shardtensor", *parts[: at + 1]]))
        found = getattr(found, part)
    return found


def test_the_page_names_many():
    assert len(NAMES) > 80, NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name):
    assert find(name) is not None


def test_what_does_not_exist_is_found():
    with pytest.raises(ModuleNotFoundError):
        find("shardtensor.knn")
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        find("shardtensor.ShardTensor.full_tensors")


def test_their_names_are_aliases():
    assert distributed.PhysicsNeMoUndefinedGroupError is distributed.UndefinedGroupError
    theirs = distributed.PhysicsNeMoUninitializedDistributedManagerWarning
    assert theirs is distributed.UninitializedManagerError


@pytest.mark.parametrize("module", ["", ".distributed"])
def test_what_a_package_exports_exists(module):
    package = importlib.import_module(f"shardtensor{module}")
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert len(set(package.__all__)) == len(package.__all__)


def test_their_classes_of_the_job_lie_in_the_modules_of_the_same_name():
    for module, names in {
        "manager": "DistributedManager",
        "config": "ProcessGroupConfig ProcessGroupNode",
        "autograd": "all_gather_v gather_v scatter_v indexed_all_to_all_v",
        "utils": "reduce_loss mark_module_as_shared unmark_module_as_shared",
    }.items():
        found = importlib.import_module(f"shardtensor.distributed.{module}")
        for name in names.split():
            assert getattr(found, name) is getattr(distributed, name)
    assert callable(distributed.fused_all_reduce)
