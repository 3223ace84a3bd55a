"""torch's pytree, which has no public name in Python, with a faster path for a single tensor, as most states are."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_map_only as tree_map_only

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_structure", "tree_unflatten"]

_SINGLE_LEAF = _pytree.tree_structure(0)  # of a single leaf


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of the tree and its structure."""
    return ([tree], _SINGLE_LEAF) if isinstance(tree, Tensor) else _pytree.tree_flatten(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of the tree."""
    return [tree] if isinstance(tree, Tensor) else _pytree.tree_leaves(tree)


def tree_structure(tree: Any) -> TreeSpec:
    """Return the structure of the tree."""
    return _SINGLE_LEAF if isinstance(tree, Tensor) else _pytree.tree_structure(tree)


def tree_unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """Return the tree of these leaves and this structure."""
    return leaves[0] if spec is _SINGLE_LEAF and len(leaves) == 1 else _pytree.tree_unflatten(leaves, spec)


def tree_map(function: Callable[..., Any], tree: Any, *more: Any) -> Any:
    """Return a tree of the function's values at the leaves of these trees of one structure."""
    if isinstance(tree, Tensor) and not more:
        return function(tree)
    return _pytree.tree_map(function, tree, *more)
