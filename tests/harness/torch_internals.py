"""Private names of the package that many tests use, and that need torch."""

# ruff: noqa: F401

from __future__ import annotations

from zarrckpt._dcp import channel
from zarrckpt._ranks import links
from zarrckpt._ranks.call_group import CallGroup
from zarrckpt._ranks.errors import LostPeerError
from zarrckpt._ranks.group import Ranks
from zarrckpt._ranks.pieces import Handle, MessageChannel
from zarrckpt._save import agree
from zarrckpt._save.steps import RankSave
from zarrckpt._state.local_state import LocalState
