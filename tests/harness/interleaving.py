"""Saves and readers over one store, one operation at a time, in any order.

- :class:`Agent` reruns the code from its start for each answer that differs from those before. The result is a tree of
  all possible runs. :class:`Exploration` visits every interleaving of several agents, and each state of store and
  agents once. A crash needs no extra case, because any agent may be silent after any state. Neither does a rank that
  continues after its save is dead.
- :func:`play` lets agents that make whole saves continue in random order.

``python tests/harness/interleaving.py --schedules 20000`` does more of both than the tests do.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from harness.internals import Store
from harness.one_at_a_time import (
    ROOT,
    AskedStore,
    Broken,
    Content,
    Failed,
    Judge,
    Op,
    Order,
    Save,
    answer,
    check_outcomes,
    check_reads,
    committed_first,
    one_thread,
    read,
    running,
    whole_save,
)

# -- every interleaving


class Agent:
    """All possible runs of a piece of code, by the answers that it gets. Node 0 is its start."""

    def __init__(self, code: Callable[[Store], str], order: Order = list) -> None:
        self._code, self._order = code, order
        self._edges: dict[tuple[int, Any], int] = {}
        self._answers: list[tuple[Any, ...]] = []
        self.nodes: list[Op | str] = []
        """The next operation, or the result of the code."""
        self.runs = 0

    def start(self, content: Content) -> None:
        """Make the nodes of a run that nothing interrupts."""
        if not self.nodes:
            self._run((), content)

    def after(self, node: int, found: Any, content: Content) -> int:
        """Return the node that an answer leads to. ``content`` is the content of the store after the operation."""
        if (node, found) not in self._edges:
            self._edges[node, found] = len(self.nodes)
            self._run((*self._answers[node], found), content)
        return self._edges[node, found]

    def _run(self, known: tuple[Any, ...], content: Content) -> None:
        """Run the code from its start with known answers, and then to its end, alone with this content.

        The second part adds a node for each operation. Most of them are needed: an agent that continues alone is one of
        the interleavings.
        """
        answers = [*known]
        replayed = iter(known)

        def ask(op: Op) -> Any:
            nonlocal content
            for found in replayed:
                return found
            self._add(op, answers)
            found, content = answer(content, op)
            answers.append(found)
            self._edges[len(self.nodes) - 1, found] = len(self.nodes)
            return found

        running.order = self._order
        self.runs += 1
        try:
            end = self._code(AskedStore(ask))
        except Exception as err:
            end = f"{type(err).__name__}: {err}"
        self._add(end, answers)

    def _add(self, node: Op | str, answers: list[Any]) -> None:
        self.nodes.append(node)
        self._answers.append(tuple(answers))


class Faults(NamedTuple):
    """Maximum number of faults of each kind in one history."""

    lost_answers: int = 0
    """A conditional put is done, its answer is lost, and the client repeats it."""
    repeated_deletes: int = 0
    """A deletion reaches the store once more, at any later time."""
    repeated_puts: int = 0
    """The put of a chunk reaches the store once more, at any later time."""
    failures: int = 0
    """An operation fails, done or not."""

    def less(self, name: str) -> Faults:
        """Return the same with one fault less."""
        return self._replace(**{name: getattr(self, name) - 1})

    def may_repeat(self, op: Op) -> str:
        """Return the fault by which a request may arrive again, "" if it may not."""
        if op.verb == "delete" and self.repeated_deletes:
            return "repeated_deletes"
        return "repeated_puts" if op.verb == "put" and "/c." in op.key and self.repeated_puts else ""


@dataclass
class Found:
    """Counts and results of an exploration."""

    states: int = 0
    ends: int = 0
    contents: int = 0
    runs: int = 0
    """Number of runs of the code, from its start to its end."""
    outcomes: set[tuple[str, ...]] = field(default_factory=set)
    complete: bool = True


class State(NamedTuple):
    """A state of the store and of all agents."""

    stored: int
    """The number of the store's content."""
    places: tuple[int, ...]
    """The node of each agent."""
    faults: Faults
    """The faults that may still occur."""
    sent: frozenset[Op] = frozenset()
    """The requests that may arrive again."""
    turn: int = -1
    """The agent whose turn it is, if turns count."""
    changes: int = 0
    """Number of interruptions of agents that are left."""


class Exploration:
    """Every state that agents over one store can reach."""

    def __init__(
        self,
        agents: Sequence[Agent],
        content: Content,
        faults: Faults,
        quiet: Callable[[Op], bool],
        interruptions: int | None,
    ) -> None:
        self._agents, self._quiet = agents, quiet
        self._bounded = interruptions is not None
        self._numbers: dict[frozenset[tuple[str, bytes]], int] = {}
        self.contents: list[Content] = []
        self._answers: dict[tuple[int, Op], tuple[Any, int]] = {}
        places = (0,) * len(agents)
        for agent in agents:
            agent.start(content)
        self._start = State(self._number(content), places, faults, changes=interruptions or 0)

    def run(
        self, check: Callable[[Content], object], at_end: Callable[[Content, list[str]], object], cap: int
    ) -> Found:
        """Call ``check`` for every content of the store, and ``at_end`` when all agents have ended."""
        seen, todo, found = {self._start: self._start}, [self._start], Found()
        checked = 0
        while todo and found.states < cap:
            state = todo.pop()
            found.states += 1
            following = [*self._steps(state)]
            try:
                for number in range(checked, len(self.contents)):
                    check(self.contents[number])
                checked = len(self.contents)
                ends = [self._agents[i].nodes[node] for i, node in enumerate(state.places)]
                if not any(isinstance(end, Op) for end in ends):
                    found.ends += 1
                    found.outcomes.add(tuple(map(str, ends)))
                    at_end(self.contents[state.stored], [str(end) for end in ends])
            except AssertionError as err:
                raise Broken(f"{err}\nafter:\n" + "\n".join(self._path(seen, state))) from err
            for other in following:
                if other not in seen:
                    seen[other] = state
                    todo.append(other)
        found.complete = not todo
        found.contents, found.runs = len(self.contents), sum(agent.runs for agent in self._agents)
        return found

    def _steps(self, state: State) -> Iterator[State]:
        for index, place in enumerate(state.places):
            op = self._agents[index].nodes[place]
            if isinstance(op, Op) and (turned := self._turned(state, index)) is not None:
                yield from self._answered(turned, index, op)
        for op in state.sent:
            after = self._do(state.stored, op)[1]
            if after != state.stored and (fault := state.faults.may_repeat(op)):
                left = state.faults.less(fault)
                sent = frozenset(other for other in state.sent if left.may_repeat(other))
                yield state._replace(stored=after, faults=left, sent=sent)

    def _turned(self, state: State, index: int) -> State | None:
        """Return the state with an agent's turn, or None if no agent may be interrupted any more."""
        if not self._bounded or state.turn == index:
            return state
        goes_on = state.turn >= 0 and isinstance(self._agents[state.turn].nodes[state.places[state.turn]], Op)
        if goes_on and not state.changes:
            return None
        return state._replace(turn=index, changes=state.changes - goes_on)

    def _answered(self, state: State, index: int, op: Op) -> Iterator[State]:
        """Yield the states that an agent's operation may lead to."""
        found, after = self._do(state.stored, op)
        failed, faults = state, state.faults
        if faults.may_repeat(op):
            state = state._replace(sent=state.sent | {op})
        done = state._replace(stored=after)
        yield self._settled(done, index, found)
        if faults.lost_answers and found is True and op.verb in ("create", "replace"):
            yield done._replace(faults=faults.less("lost_answers"))
        if faults.failures:
            left = faults.less("failures")
            yield self._settled(failed._replace(faults=left), index, Failed("failed"))
            if after != state.stored:
                yield self._settled(done._replace(faults=left), index, Failed("its answer was lost"))

    def _settled(self, state: State, index: int, found: Any) -> State:
        """Give an agent its answer. Do its next operations at once as long as they are quiet."""
        agent, stored = self._agents[index], state.stored
        node = agent.after(state.places[index], found, self.contents[stored])
        while isinstance(op := agent.nodes[node], Op) and self._quiet(op):
            found, stored = self._do(stored, op)
            node = agent.after(node, found, self.contents[stored])
        return state._replace(stored=stored, places=(*state.places[:index], node, *state.places[index + 1 :]))

    def _do(self, stored: int, op: Op) -> tuple[Any, int]:
        known = self._answers.get((stored, op))
        if known is None:
            found, content = answer(self.contents[stored], op)
            known = self._answers[stored, op] = (found, self._number(content))
        return known

    def _number(self, content: Content) -> int:
        key = frozenset(content.items())
        if key not in self._numbers:
            self._numbers[key] = len(self.contents)
            self.contents.append(content)
        return self._numbers[key]

    def _path(self, seen: dict[State, State], state: State) -> list[str]:
        """Return the operations that led to a state."""
        lines = []
        while seen[state] != state:
            before = seen[state]
            moved = [i for i in range(len(state[1])) if state[1][i] != before[1][i]]
            op = self._agents[moved[0]].nodes[before[1][moved[0]]] if moved else ""
            text = f"{op.verb} {op.key}" if isinstance(op, Op) else "a repeated request"
            lines.append(
                f"{moved}: {text} -> {self._agents[moved[0]].nodes[state[1][moved[0]]]!r:.80}" if moved else text
            )
            state = before
        return lines[::-1]


def is_document(op: Op) -> bool:
    """Whether an operation puts a document that the protocol does not read: of arrays, or of most tables."""
    parts = op.key.split("/")[-2:]
    return op.verb == "put" and (parts in (["w", ROOT], ["checksums", ROOT]) or parts[0] == "writers")


def nothing_quiet(op: Op) -> bool:
    """Return False, so that every operation is a separate step."""
    return False


def explore(
    saves: Sequence[Save],
    content: Content,
    *,
    readers: int = 0,
    faults: Faults | None = None,
    quiet: Callable[[Op], bool] = is_document,
    order: Order = list,
    interruptions: int | None = None,
    most: int = 10**9,
    sampled: int = 100,
) -> Found:
    """Explore every interleaving of saves and readers. Stop after ``most`` states.

    At any moment, the committed checkpoint must be whole. For a sample of the contents, the next save must succeed.
    With ``interruptions``, an agent runs until it ends, except for that number of interruptions. Most mistakes show so.
    """
    judge, after = Judge(), Save(9)
    agents = [*(Agent(save, order) for save in saves), *(Agent(read) for _ in range(readers))]
    exploration = Exploration(agents, content, faults or Faults(), quiet, interruptions)

    def at_end(content: Content, ends: list[str]) -> None:
        check_outcomes(content, ends[: len(saves)])
        check_reads(ends[len(saves) :])

    found = exploration.run(judge.committed, at_end, most)
    for stored in exploration.contents[:: max(1, len(exploration.contents) // max(1, sampled))][:sampled]:
        judge.can_go_on(stored, after)
    return found


# -- random schedules of whole saves


def play(
    seed: int,
    content: Content,
    saves: Sequence[Callable[[Store], str]],
    reads: int,
    judge: Judge,
    repeated_deletes: float = 0.1,
) -> tuple[Content, list[str], int]:
    """Play one random schedule of saves and readers: saves die, requests fail, answers get lost, deletions repeat.

    Return the content at its end, the results of each save and reader, and the number of operations. After an operation
    a deletion repeats with the probability ``repeated_deletes``.
    """
    chance = random.Random(seed)
    agents, faulty = [Agent(code, partial(_shuffled, seed)) for code in (*saves, *[read] * reads)], range(len(saves))
    for agent in agents:
        agent.start(content)
    places, waiting = [0] * len(agents), {*range(len(agents))}
    stay, dies = chance.choice((0.0, 0.5, 0.9)), chance.choice((None, *faulty))
    death, fault = chance.randrange(40), chance.choice((0.0, 0.02))
    deleted: list[str] = []
    current, step = 0, 0
    while waiting:
        if current not in waiting or chance.random() >= stay:
            current = chance.choice(sorted(waiting))
        op = agents[current].nodes[places[current]]
        if not isinstance(op, Op):
            waiting.remove(current)
            continue
        step += 1
        if current == dies and step >= death:
            waiting.remove(current)
            continue
        found, after = answer(content, op)
        if op.verb == "delete":
            deleted.append(op.key)
        if chance.random() < fault and current in faulty:
            if op.verb in ("create", "replace") and found is True:
                content = after
                found, _ = answer(content, op)
            else:
                content = chance.choice((content, after))
                found = Failed("by chance")
        else:
            content = after
        if deleted and chance.random() < repeated_deletes:
            content = answer(content, Op("delete", chance.choice(deleted)))[1]
        judge.committed(content)
        places[current] = agents[current].after(places[current], found, content)
    ends = [agent.nodes[place] for agent, place in zip(agents, places, strict=True)]
    return content, ["dead" if isinstance(end, Op) else end for end in ends], step


def _shuffled(seed: int, jobs: list[Any]) -> list[Any]:
    """Return jobs in a random order, which is the same each time that an agent runs again."""
    return random.Random(f"{seed} {len(jobs)}").sample(jobs, len(jobs))


@dataclass
class Played:
    """Counts and results of random schedules."""

    schedules: int = 0
    operations: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    def add(self, operations: int, ends: Iterable[str]) -> None:
        """Count one schedule."""
        self.schedules += 1
        self.operations += operations
        self.ends.update(ends)


def play_many(seeds: Iterable[int], saves: int = 3, readers: int = 1) -> Played:
    """Play and check random schedules, each over an empty store or over a committed save."""
    judge, after, played, base = Judge(), Save(9), Played(), committed_first()
    codes = [whole_save(number) for number in range(1, saves + 1)]
    for seed in seeds:
        try:
            content, ends, operations = play(seed, base if seed % 2 else {}, codes, readers, judge)
            check_outcomes(content, ends[:saves])
            check_reads(ends[saves:])
            judge.can_go_on(content, after)
        except AssertionError as err:
            raise Broken(f"seed {seed}: {err}") from err
        played.add(operations, ends)
    return played


def campaigns(most: int) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Yield explorations that take minutes, each of at most ``most`` states."""
    base, saves = committed_first(), [Save(1), Save(2), Save(3)]
    for name, content in (("nothing", {}), ("a committed save", base)):
        yield (
            f"two saves over {name}, every operation a step",
            partial(explore, saves[:2], content, quiet=nothing_quiet, most=most, sampled=300),
        )
        yield (
            f"two saves and two readers over {name}",
            partial(explore, saves[:2], content, readers=2, most=most, sampled=300),
        )
        for faults in (Faults(1, 1, 0, 1), Faults(1, 1, 1, 0)):
            yield (
                f"two saves over {name}, {faults}",
                partial(
                    explore, saves[:2], content, faults=faults, most=most, sampled=0 if faults.repeated_puts else 300
                ),
            )
        yield (
            f"three saves over {name}, 4 interruptions, a lost answer",
            partial(explore, saves, content, faults=Faults(1), interruptions=4, most=most, sampled=300),
        )
        yield f"three saves over {name}", partial(explore, saves, content, most=most, sampled=300)


def main() -> None:
    """Run longer explorations and schedules than the tests do."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedules", type=int, default=20000, help="how many by chance")
    parser.add_argument("--states", type=int, default=5_000_000, help="at most so many states of each exploration")
    args = parser.parse_args()
    with one_thread():
        for name, campaign in campaigns(args.states):
            began = time.monotonic()
            print(f"{name}: {campaign()}, {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        print(f"by chance: {play_many(range(args.schedules))}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
