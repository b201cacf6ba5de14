"""The principals of running processes, as the query API looks them up."""

from __future__ import annotations

import os

from wattspan.api.authorization import Authorization, ProcessPrincipals
from wattspan.http.sockets import Peer
from wattspan.model import HOST_ROOT, Consumer, Principal
from wattspan.processes.principals import PrincipalResolver
from wattspan.processes.procfs import ProcFs


def this_process() -> Consumer:
    stat = ProcFs().stat(os.getpid())
    return Consumer(os.getpid(), stat.started)


def test_principal_of_a_running_process_is_that_of_its_connections() -> None:
    resolver, process = PrincipalResolver(), this_process()
    connected = resolver.of_connection(ProcFs(), os.getpid(), os.geteuid())
    assert connected is not None
    assert ProcessPrincipals(resolver)(process) == connected
    assert ProcessPrincipals(resolver)(process._replace(started=1)) is None


def test_root_of_the_host_and_the_agents_principal_read_counters() -> None:
    own = Principal(1000, "0123456789ab")
    authorization = Authorization(lambda _: None, own)
    readers = (HOST_ROOT, own)
    others = (None, Principal(0, "0123456789ab"), Principal(1000), Principal(None, pod="6f1c"))
    assert all(authorization.may_read_counters(Peer(principal=one)) for one in readers)
    assert not any(authorization.may_read_counters(Peer(uid=0, principal=one)) for one in others)
