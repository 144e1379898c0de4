"""Small worlds: devices with a handful of impressions over two epochs, and what a querier can learn from them, exactly.

Used by `trefoil experiment attack` and by the tests of the device's privacy. The engine is the real one; only its noise
is worked out on paper: the helpers add at least discrete Laplace noise to every bucket, P(x) ∝ e^(−γ|x|), so an answer
of theirs tells two databases apart by at most γ·‖ρ − ρ'‖₁, and outputs beyond both sums attain it. What an adaptive
querier can learn altogether is the value of a game on the two devices' filters, which `worst_loss` solves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple, Protocol, TypeVar

from device.budget import FilterKind, FilterOwner, PrivacyFilter
from device.conversion import AttributionRequest, ConversionOptions
from device.device import Device
from device.epoch import DeviceCoins
from device.events import ImpressionOptions
from device.limits import TREFOIL_SERVICE, DeviceLimits
from device.report import PlainSeal
from device.stores.memory_store import MemoryStore
from protocol.units import DAY, HOUR

WEEK = 7 * DAY
# Where epoch 0 of every small world begins.
START = 472_222 * HOUR
# The last hour of epoch 1, when small worlds are asked.
NOW = START + 2 * WEEK - HOUR
QUERIER = "shop.example"
PUBLISHER = "news.example"
UNBOUNDED = Fraction(10**30)

PlainDevice = Device[tuple[int, ...]]
Options = ConversionOptions | AttributionRequest


class Event(NamedTuple):
    """One impression: its epoch, its bucket, how many days into the epoch it was seen, where, and saved by whom."""

    epoch: int
    bucket: int
    day: int = 2
    site: str = PUBLISHER
    priority: int = 0
    match_value: int = 0
    # The site of the frame that saved it, if it is another than `site`.
    caller: str | None = None

    @property
    def time(self) -> int:
        return START + self.epoch * WEEK + self.day * DAY + self.bucket


Events = tuple[Event, ...]
# What every watched filter of a device has paid: owner, epoch, amount.
Spending = tuple[tuple[FilterOwner, int, int], ...]
State = TypeVar("State", bound=Hashable)


class Clock:
    """A clock that the player sets."""

    def __init__(self, now: int = NOW) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


class RewindableStore(MemoryStore):
    """A store whose filters can be put back to an earlier state, to try every next query from there.

    Filters of other kinds than `watched` are fresh again after every step; they must be too large to refuse anything.
    """

    def __init__(self, watched: Collection[FilterKind]) -> None:
        super().__init__(debug=True)
        self._watched = watched

    def spending(self) -> Spending:
        """Return what every watched filter has paid: the part of a device's state that queries change."""
        watched = [(owner, ledger) for owner, ledger in self._filters.items() if owner.kind in self._watched]
        return tuple(sorted((owner, *entry) for owner, ledger in watched for entry in ledger.entries()))

    def rewind(self, spending: Spending) -> None:
        self._filters = {}
        for owner, epoch, amount in spending:
            self._filters.setdefault(owner, PrivacyFilter()).consume(epoch, amount)


class Call(NamedTuple):
    """One conversion: who asks, what, and which of the conversions it knows of it asks about."""

    options: Options
    site: str = QUERIER
    conversion: str = ""


@dataclass(frozen=True, eq=False)
class WorldQuery:
    """One released answer over reports of one device; everyone else's reports are the same in both databases."""

    calls: tuple[Call, ...]
    # What is charged and admitted is decided by these alone; the helpers' rule is ε_q/Δ_q ≤ ε_r/Δ_r for every report.
    rate: Fraction = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", min(noise_rate(call.options) for call in self.calls))


def query(*options: Options, site: str = QUERIER, conversion: str = "") -> WorldQuery:
    return WorldQuery(tuple(Call(option, site, conversion) for option in options))


def noise_rate(options: Options) -> Fraction:
    """Return γ in micro-epsilons per unit: the least noise rate under which helpers admit this report."""
    conversion = options.checked(QUERIER, QUERIER, DeviceLimits())
    return Fraction(conversion.loss_terms.epsilon_micros, conversion.loss_terms.query_sensitivity)


class ReleasedAnswer(Protocol):
    """One released answer. `rate` is γ: what a difference of one tells the two databases apart by."""

    @property
    def rate(self) -> Fraction: ...


Asked = TypeVar("Asked", bound=ReleasedAnswer)
AnyQuestion = TypeVar("AnyQuestion", bound=ReleasedAnswer, contravariant=True)


class Player(Protocol[State, AnyQuestion]):
    """A respondent that can be asked in any state, to find the best next query from there."""

    @property
    def fresh(self) -> State:
        """The state before the first question."""
        ...

    def step(self, state: State, question: AnyQuestion, /) -> tuple[tuple[int, ...], State]: ...


class SmallWorld:
    """A device with these impressions and these limits, to be asked in any state of its filters."""

    def __init__(
        self,
        events: Iterable[Event],
        limits: DeviceLimits,
        make: Callable[..., PlainDevice] = Device,
        watched: Collection[FilterKind] = (FilterKind.SITE,),
    ) -> None:
        self.store = RewindableStore(watched)
        self.clock = Clock()
        self.device = make(self.store, PlainSeal(), clock=self.clock, limits=limits, coins=fixed_coins())
        populate(self.device, self.store, self.clock, events)
        self.fresh: Spending = ()
        self._steps: dict[tuple[Spending, WorldQuery], tuple[tuple[int, ...], Spending]] = {}

    def ask(self, question: WorldQuery) -> tuple[int, ...]:
        """Return the device's part of the sum that `question` releases."""
        reports = [self.device.measure_conversion(call.site, call.options) for call in question.calls]
        return tuple(sum(numbers) for numbers in zip(*reports, strict=True))

    def step(self, spending: Spending, question: WorldQuery) -> tuple[tuple[int, ...], Spending]:
        """Return the device's report for `question` with its filters at `spending`, and their state afterwards."""
        if (spending, question) not in self._steps:
            self.store.rewind(spending)
            self._steps[spending, question] = self.ask(question), self.store.spending()
        return self._steps[spending, question]


class TwoDevices:
    """Two devices of which a site sees conversions, not which device each happened on (the game of Theorem 2).

    Conversions named in `moved` happened on the second one.
    """

    def __init__(self, first: SmallWorld, second: SmallWorld, moved: Collection[str]) -> None:
        self._devices = (first, second)
        self._moved = moved
        self.fresh: tuple[Spending, Spending] = ((), ())

    def step(
        self, state: tuple[Spending, Spending], question: WorldQuery
    ) -> tuple[tuple[int, ...], tuple[Spending, Spending]]:
        """Ask about one conversion, and so about one of the devices."""
        (call,) = question.calls
        if call.conversion in self._moved:
            report, spending = self._devices[1].step(state[1], question)
            return report, (state[0], spending)
        report, spending = self._devices[0].step(state[0], question)
        return report, (spending, state[1])


def fixed_coins(credit: float = 0.5) -> DeviceCoins:
    """Return coins that always fall the same way: sensitivity is for fixed coins."""
    return DeviceCoins(epoch_start=lambda: 0.0, credit=lambda: credit)


def populate(device: PlainDevice, store: MemoryStore, clock: Clock, events: Iterable[Event]) -> None:
    """Show the device these impressions in their order of time, then set the clock to when it will be asked."""
    with store.transaction():
        store.fix_epoch_start(START)
    for event in sorted(events, key=lambda event: event.time):
        clock.now = event.time
        options = ImpressionOptions(event.bucket, event.match_value, priority=event.priority)
        device.save_impression(event.site, options, intermediary=event.caller)
    clock.now = NOW


def l1(first: Sequence[int], second: Sequence[int]) -> int:
    """Return ‖first − second‖₁."""
    return sum(abs(one - other) for one, other in zip(first, second, strict=True))


def worst_loss(world: Player[State, Asked], neighbour: Player[State, Asked], menu: Sequence[Asked]) -> Fraction:
    """Return the largest log-likelihood ratio that an adaptive querier can see, sup ln P(o)/P'(o), in units of rates.

    By induction over what is left to ask. A transcript's ratio is the product of its answers' ratios; an answer to q
    contributes at most γ_q·‖ρ − ρ'‖₁, whatever was answered before, and attains it with positive probability. The
    filters depend on what was asked and never on the noise, so the next choice is a move from a pair of states. States
    only ever fill up, so the game ends, unless some query tells the two apart and costs neither anything: such a query
    can be asked without end, and the loss is UNBOUNDED.
    """
    solved: dict[tuple[State, State], Fraction] = {}

    def solve(mine: State, theirs: State) -> Fraction:
        loss = solved.get((mine, theirs))
        if loss is not None:
            return loss
        best = Fraction(0)
        for question in menu:
            report, mine_next = world.step(mine, question)
            other, theirs_next = neighbour.step(theirs, question)
            gain = question.rate * l1(report, other)
            if (mine_next, theirs_next) != (mine, theirs):
                gain += solve(mine_next, theirs_next)
            elif gain:
                gain = UNBOUNDED
            best = max(best, gain)
            if best >= UNBOUNDED:
                break
        solved[mine, theirs] = min(best, UNBOUNDED)
        return solved[mine, theirs]

    return solve(world.fresh, neighbour.fresh)


def w3c(buckets: int = 2, *, lookback_days: int = 13, **options: object) -> ConversionOptions:
    """Return the standard's call. Thirteen days before NOW reach both epochs, six only epoch 1."""
    return ConversionOptions(TREFOIL_SERVICE, buckets, lookback_days=lookback_days, **options)  # type: ignore[arg-type]  # checked where it is used
