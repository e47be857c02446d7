"""What happens in a seed: the job, the cap, the cloud, the limits that exist, and the faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from simulation.events import START
from simulation.guest import GuestPlan
from simulation.process import Faults, Outage
from simulation.training import Job

HORIZON_SECONDS = 5400.0
ZONES = ("zone-a", "zone-b")
# Which limits exist: without a limit, its actor is lost, has never started, or does not support it.
GUARDS = (
    (("controller", "agent"), 6),
    (("controller", "agent", "api"), 2),
    (("controller",), 4),
    (("agent",), 4),
    (("api",), 1),
    (("watch",), 1),
)


@dataclass
class Scenario:
    """All random choices that are made before a simulation begins.

    Attributes:
      provider: `http` for the real provider of the Cloud TPU API, or `simulated`.
      guards: the limits that exist: `controller`, `agent`, `api`, and `watch`, the
        watch of the startup script, which acts five minutes later. Each must hold alone.
      attacks: when the record is changed, and for how long an attacker repeats it (0: once).
      laptop_kills: when the user's process is killed, and for how long it does not run.
      laptop_ends: when it is killed for ever.
      later_cap_usd: the cap that the user gives with the second start of the command; None: none is given.
      default_cap_usd: the cap of a command without one, if the run does not exist.
    """

    guards: tuple[str, ...] = ("controller", "agent")
    provider: str = "simulated"
    zones: tuple[str, ...] = ("zone-a",)
    slice: str = "v6e-4"
    capacity: str = "spot"
    prices: dict[tuple[str, str], float] = field(default_factory=dict)
    queue_seconds: dict[str, float | None] = field(default_factory=dict)
    capacity_changes: list[tuple[float, str, float | None]] = field(default_factory=list)
    job: Job = Job(100, 5.0, 20, 5.0)
    cap_usd: float = 10.0
    default_cap_usd: float = 10.0
    later_cap_usd: float | None = None
    tells_times: bool = True
    wait_seconds: int | None = None
    poll_seconds: float = 15.0
    keeper: bool = False
    guest: GuestPlan = field(default_factory=GuestPlan)
    controller_faults: Faults = field(default_factory=Faults)
    host_faults: Faults = field(default_factory=Faults)
    clock_glitches: list[tuple[float, float, float]] = field(default_factory=list)
    attacks: list[tuple[float, float]] = field(default_factory=list)
    laptop_kills: list[tuple[float, float]] = field(default_factory=list)
    laptop_ends: float | None = None
    agent_kills: list[float] = field(default_factory=list)
    training_kills: list[float] = field(default_factory=list)
    reboots: list[float] = field(default_factory=list)
    preemptions: list[tuple[float, bool]] = field(default_factory=list)
    stop_at: float | None = None
    down_at: float | None = None

    @property
    def is_calm(self) -> bool:
        """Whether nothing prevents an orderly stop: no fault, and no command that deletes."""
        faults = (self.controller_faults, self.host_faults)
        events = (self.attacks, self.laptop_kills, self.agent_kills, self.training_kills, self.reboots)
        return (
            set(self.guards) >= {"controller", "agent"}
            and not any(any(vars(fault).values()) for fault in faults)
            and not any(events)
            and not self.preemptions
            and not self.clock_glitches
            and self.down_at is None
            and not self.guest.wall_offset
            and not self.guest.setup_failure
            and self.job.fails_at is None
        )


def draw(random: Random) -> Scenario:
    """Return the scenario of a seed."""
    sets, weights = zip(*GUARDS, strict=True)
    guards = random.choices(sets, weights)[0]
    scenario = Scenario(guards=guards, provider="http" if random.random() < 0.25 else "simulated")
    _draw_cloud(random, scenario)
    _draw_job(random, scenario)
    if random.random() < 0.12:
        return scenario  # without faults
    _draw_actors(random, scenario)
    _draw_faults(random, scenario)
    if random.random() < 0.75:
        count = random.choice((1, 1, 2, 4))
        latest = random.choice((150.0, 1500.0))
        scenario.attacks = sorted(
            (START + random.uniform(5.0, latest), random.choice((0.0, 0.0, 300.0, 5000.0))) for _ in range(count)
        )
    if random.random() < 0.1:
        scenario.stop_at = START + random.uniform(30, 1200)
    if random.random() < 0.15:
        scenario.down_at = START + random.uniform(10, 1500)
    return scenario


def _draw_cloud(random: Random, scenario: Scenario) -> None:
    scenario.slice = random.choice(("v6e-4", "v6e-4", "v6e-8"))
    scenario.zones = ZONES[: random.choice((1, 2))]
    price = random.choice((6.0, 20.0, 60.0))
    scenario.prices = {("v6e-4", zone): price * (1 + 0.2 * at) for at, zone in enumerate(ZONES)}
    scenario.prices |= {("v6e-8", zone): 2 * usd for (_, zone), usd in list(scenario.prices.items())}
    scenario.prices |= {("e2-small", zone): 0.6 for zone in ZONES}
    scenario.queue_seconds = {zone: random.choice((5.0, 15.0, 40.0, 200.0)) for zone in ZONES}
    scenario.capacity_changes = [
        (START + random.uniform(0, 900), random.choice(ZONES), random.choice((None, 5.0, 5.0, 300.0)))
        for _ in range(random.choice((0, 0, 1, 2)))
    ]
    scenario.tells_times = random.random() < 0.85
    scenario.capacity = "flex-start" if "api" in scenario.guards else "spot"
    scenario.wait_seconds = random.choice((None, None, 120))
    scenario.poll_seconds = random.choice((10.0, 15.0, 20.0))
    scenario.keeper = "controller" in scenario.guards and random.random() < 0.2


def _draw_job(random: Random, scenario: Scenario) -> None:
    steps = random.choice((20, 60, 150, 400))
    step_seconds = random.choice((2.0, 5.0, 8.0))
    scenario.job = Job(steps, step_seconds, random.choice((5, 20, 50)), random.choice((1.0, 5.0, 20.0)))
    price = max(usd for (slice, _), usd in scenario.prices.items() if slice == scenario.slice)
    # A third of the caps are too small for the job. An attempt needs three minutes of budget to begin.
    seconds = random.choice((random.uniform(200, 500), random.uniform(200, 500), random.uniform(300, 1200), 1800.0))
    scenario.cap_usd = round(price * seconds / 3600, 4)
    scenario.default_cap_usd = round(scenario.cap_usd * random.choice((0.3, 3.0)), 4)
    scenario.guest = GuestPlan(
        boot_seconds=random.choice((5.0, 20.0)),
        install_seconds=random.choice((5.0, 40.0)),
        poll_seconds=random.choice((5.0, 10.0, 15.0)),
        wall_offset=random.choice((0.0, 0.0, -7200.0, 1e6)),
    )


def _draw_actors(random: Random, scenario: Scenario) -> None:
    """Remove the actors of the limits that do not exist, and restart the others."""
    guest = scenario.guest
    guest.has_watch = "agent" in scenario.guards or "watch" in scenario.guards
    if "agent" not in scenario.guards:
        kind = random.randrange(2 if "watch" in scenario.guards else 3)
        if kind == 0:
            guest.has_agent = False
        elif kind == 1:
            guest.agent_dies_after = random.uniform(5, 600)
        else:
            guest.freezes_after = random.uniform(30, 600)
    if "controller" not in scenario.guards:
        scenario.laptop_ends = START + random.choice((random.uniform(1, 80), random.uniform(60, 900)))
        if random.random() < 0.15:
            guest.setup_failure = "failed: line 3"
    for _ in range(random.choice((0, 0, 1, 3))):
        scenario.laptop_kills.append((START + random.uniform(5, 1200), random.uniform(1, 60)))
    if random.random() < 0.15:
        scenario.later_cap_usd = round(scenario.cap_usd * random.choice((0.5, 1.5)), 4)
    scenario.agent_kills = [START + random.uniform(60, 1200) for _ in range(random.choice((0, 0, 1, 3)))]
    scenario.training_kills = [START + random.uniform(60, 1200) for _ in range(random.choice((0, 0, 0, 1)))]
    scenario.reboots = [START + random.uniform(60, 1200) for _ in range(random.choice((0, 0, 0, 0, 0, 1)))]
    scenario.preemptions = [
        (START + random.uniform(30, 1500), random.random() < 0.3) for _ in range(random.choice((0, 0, 1, 2)))
    ]
    if random.random() < 0.05:
        scenario.job = Job(*list(vars(scenario.job).values())[:4], fails_at=random.randrange(scenario.job.steps))


def _draw_faults(random: Random, scenario: Scenario) -> None:
    def chance(probability: float, value: float) -> float:
        return value if random.random() < probability else 0.0

    scenario.controller_faults = Faults(
        kill=chance(0.3, 0.002), pause=chance(0.3, 0.004), lost=chance(0.3, 0.03), late=chance(0.15, 0.03)
    )
    scenario.controller_faults.odd = scenario.host_faults.odd = chance(0.2, 0.02)
    scenario.host_faults = Faults(kill=chance(0.3, 0.003), lost=chance(0.3, 0.03), late=chance(0.15, 0.03))
    outages = []
    for _ in range(random.choice((0, 0, 1, 1, 2, 3))):
        start = START + random.uniform(0, random.choice((120, 1500, 1500)))
        target = random.choice(("api", "bucket", "bucket"))
        seconds = random.choice((20.0, 100.0, 400.0) if target == "api" else (20.0, 100.0, 400.0, 6000.0))
        users = random.choice(("all", "all", "laptop", "host"))
        kind = random.choice(
            ("down", "denied", "login", "odd", "pages") if target == "api" else ("down", "denied", "hang")
        )
        outages.append(Outage(target, users, start, start + seconds, kind))
    scenario.controller_faults.outages = scenario.host_faults.outages = outages
    # A controller that starts while the API's clock is wrong has no other clock. The clock of an agent is on its disk.
    longest = (1.0, 30.0) if "controller" in scenario.guards else (30.0, 400.0, 6000.0)
    for _ in range(random.choice((0, 0, 0, 1))):
        start = START + random.uniform(0, 900)
        offset = random.choice((-START, -7200.0, 7200.0, 1e6))
        scenario.clock_glitches.append((start, start + random.choice(longest), offset))
