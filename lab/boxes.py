"""The lab as a whole: boxes and nodes brought up and taken down, with the network they share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lab import keys, machine, network, uv_cache
from lab.box import Box
from lab.mounts import remove_tree
from lab.node import Node
from lab.progress import step
from lab.settings import CACHE, HOST_NUMBERS, LXC_ROOT, NODES, RUNTIME, UV_CACHE, address, discarded

__all__ = ["Box", "Lab", "host"]


def host(name: str) -> Box:
    """The box or the node `name`."""
    return Node(name) if name in NODES else Box(name)


class Lab:
    """The boxes of this machine, with the network they share."""

    @staticmethod
    def boxes() -> list[Box]:
        """Boxes that have any trace on disk, complete or not."""
        return [box for box in map(host, HOST_NUMBERS) if box.directory.exists()]

    @staticmethod
    def up(names: Iterable[str], *, wheels: bool = True) -> list[Box]:
        """Bring up the boxes `names`. What exists already is kept; what was half-made is made anew.

        `wheels`: a box that is made now gets the lab's wheels.
        """
        boxes = [host(name) for name in names]
        for box in boxes:
            address(box.name)  # refuses an unknown name before anything is made
        machine.require_root()
        with machine.exclusive():
            machine.install_missing()
            images = {box.name: box.ensure_image() for box in boxes}
            with step("bridge, address translation, ssh key"):
                network.ensure_network()
                keys.ensure_key()
            for box in boxes:
                Lab._up_one(box, images[box.name], wheels=wheels)
        return boxes

    @staticmethod
    def down(names: Iterable[str] | None = None, *, purge: bool = False) -> None:
        """Destroy the boxes `names`, or all. The network, the key and `.lab/` go with the last box.

        `purge` also removes the image and the shared uv cache.
        """
        Lab.discard(names, purge=purge)
        Lab.sweep()

    @staticmethod
    def discard(names: Iterable[str] | None = None, *, purge: bool = False) -> None:
        """`down`, but for the files of the boxes, which are many: those are put aside for `sweep`."""
        machine.require_root()
        with machine.exclusive():
            for box in Lab.boxes() if names is None else [host(name) for name in names]:
                with step(f"{box.name}: destroying"):
                    box.discard()
            if Lab.boxes():
                return
            with step("removing bridge, nftables table, ssh key"):
                network.remove_network()
                keys.remove()
                remove_tree(RUNTIME)
                remove_tree(CACHE / ".building")
            if purge:
                with step(f"removing {CACHE}"):
                    remove_tree(CACHE)

    @staticmethod
    def sweep() -> None:
        """Remove the files of discarded boxes. Boxes may come and go meanwhile; another sweep is waited for."""
        machine.require_root()
        if discarded():
            with machine.locked(LXC_ROOT), step("removing files of destroyed boxes"):
                for directory in discarded():
                    remove_tree(directory)

    @staticmethod
    def save_cache(name: str) -> None:
        """Keep the wheels that the box `name` has fetched for later boxes. Nothing may install in the box meanwhile."""
        machine.require_root()
        with machine.exclusive(), step(f"{name}: linking new wheels into {UV_CACHE}"):
            for root in host(name).wheel_roots():
                uv_cache.save(root)

    @staticmethod
    def _up_one(box: Box, image: Path, *, wheels: bool) -> None:
        if not box.exists():
            with step(f"{box.name}: unpacking the image{', linking the wheel cache' if wheels else ''}"):
                box.create(image, wheels=wheels)
        keys.authorize(box.rootfs, box.address)
        with step(f"{box.name}: booting"):
            box.start()
