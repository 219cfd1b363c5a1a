"""How much room the limits of the process itself leave, which a forecast has to know."""

from __future__ import annotations

from tests.kit.ownprocess import in_own_process

LEFT = """
import resource
from memtools import _core
from memtools._monitor.host import rooms_of_process
from memtools._monitor.signals import Limits

limits = Limits(_core.Sampler(10**7), _core.Probe(), ())
assert rooms_of_process() == []
with open("/proc/self/status") as status:
    now = 1024 * int(status.read().split("VmData:")[1].split()[0])
resource.setrlimit(resource.RLIMIT_DATA, (now + (100 << 20), resource.RLIM_INFINITY))
(room,) = rooms_of_process()
assert 90 << 20 < room <= 100 << 20, room
assert 90 << 20 < limits.room() <= 100 << 20, limits.room()
kept = bytes(50 << 20)
assert limits.room() <= 50 << 20, limits.room()
resource.setrlimit(resource.RLIMIT_AS, (1 << 45, resource.RLIM_INFINITY))
assert len(rooms_of_process()) == 2
"""


def test_room_ends_where_a_limit_of_the_process_is_met_first() -> None:
    in_own_process(LEFT)
