"""Events of a cluster in production, as checks; their duration is an argument."""

from __future__ import annotations

import time

import httpx
from openai import OpenAI
from tests.ray_cluster.load import Load, Tally
from tests.ray_cluster.local_cluster import KEY, LocalCluster


def talk(cluster: LocalCluster) -> str:
    """Use the openai package: a stream, a seed, an unknown key, a client that hangs up."""
    client = OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0)
    texts = []
    for _ in range(2):
        chunks = client.completions.create(
            model="demo", prompt="Once upon a time", max_tokens=40, temperature=0.8, seed=11, stream=True
        )
        texts.append("".join(chunk.choices[0].text for chunk in chunks))
    assert texts[0] == texts[1] != "", texts
    assert [item.id for item in client.models.list()] == ["demo"]
    wrong = httpx.post(f"{cluster.url}/v1/completions", headers={"authorization": "Bearer no"}, json={"prompt": "x"})
    assert wrong.status_code == 401, wrong.text
    endless = client.completions.create(
        model="demo", prompt="Far away", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(endless))
    endless.close()
    wait_until_idle(cluster)
    late = httpx.post(
        f"{cluster.url}/completion",
        headers={"authorization": f"Bearer {KEY}"},
        json={"prompt": "x", "n_predict": 900, "ignore_eos": True, "t_max_predict_ms": 50},
    )
    assert late.status_code == 200, late.text
    return f"two seeded streams of {len(texts[0])} characters agree; a client that hung up has left no slot"


def wait_until_idle(cluster: LocalCluster, timeout_s: float = 20.0) -> None:
    """Wait until no slot is in use, as the replicas report."""
    end = time.monotonic() + timeout_s
    while any(replica["processing"] or replica["waiting"] for replica in cluster.replicas()):
        assert time.monotonic() < end, f"slots are in use: {cluster.replicas()}"
        time.sleep(0.1)


def kill_replicas(cluster: LocalCluster, num_kills: int, every_s: float, num_streams: int = 32) -> str:
    """Kill a replica every few seconds under load; no stream is without its end, and each token comes once."""
    load = Load(cluster, num_streams, num_tokens=500)
    for _ in range(num_kills):
        time.sleep(every_s)
        cluster.wait_for(2, 90)
        cluster.kill_replica()
    time.sleep(every_s / 2)
    tally = load.stop()
    cluster.wait_for(2, 90)
    return _said(tally, f"{num_kills} replicas killed, one every {every_s:.0f} s")


def end_an_engine(cluster: LocalCluster, num_streams: int = 16) -> str:
    """Have the engine of a replica give up, with no restart of its worker: its streams go on at the other."""
    load = Load(cluster, num_streams, num_tokens=500)
    time.sleep(5)
    ended = cluster.kill_worker()
    cluster.wait_for(2, 150, without=frozenset({ended}))
    time.sleep(5)
    return _said(load.stop(), "an engine gave up, and its replica was replaced")


def update_under_load(cluster: LocalCluster, num_streams: int = 16) -> str:
    """Replace all replicas in turn by replicas with fewer slots."""
    load = Load(cluster, num_streams, num_tokens=500)
    cluster.update(num_slots=24)
    tally = load.stop()
    assert {item["slots"] for item in cluster.wait_for(2, 60)} == {24}
    return _said(tally, "a rolling update to 24 slots a replica")


def restart_the_router(cluster: LocalCluster) -> str:
    """Kill the ingress under load: its streams break, the next one serves, and no slot is lost."""
    load = Load(cluster, 8, num_tokens=500)
    time.sleep(2)
    before = cluster.kill_ingress()
    cluster.wait_for(2, 90)
    num_broken = len(load.tally.failures)
    time.sleep(5)
    num_after = load.tally.num_done
    assert cluster.get("/cluster")["ingress"]["pid"] != before
    tally = load.stop()
    assert tally.num_done > num_after, "no stream has ended since the restart"
    wait_until_idle(cluster, 60)
    return f"{num_broken} streams broke with the ingress, {tally.num_done} ended; all slots are free"


def scale_with_load(cluster: LocalCluster, num_streams: int = 16) -> str:
    """Let more streams wait than one replica has slots: another one comes, and goes when they are over. None is lost."""
    assert len(cluster.wait_for(1)) == 1
    began_s, load = time.monotonic(), Load(cluster, num_streams, num_tokens=500)
    cluster.wait_for(2, 120)
    grown_s = time.monotonic() - began_s
    time.sleep(10)
    tally, over_s = load.stop(), time.monotonic()
    while len(cluster.replicas()) != 1:
        assert time.monotonic() < over_s + 120, f"still there: {cluster.replicas()}"
        time.sleep(0.5)
    said = _said(tally, f"a second replica {grown_s:.0f} s after the load began")
    return f"{said}; one replica again {time.monotonic() - over_s:.0f} s after its end"


def _said(tally: Tally, what: str) -> str:
    assert not tally.failures, f"{what}: {len(tally.failures)} streams failed: {tally.failures[:5]}"
    assert tally.num_done > 0
    return (
        f"{what}: {tally.num_done} streams ended, {tally.num_tokens} tokens, each once; {tally.num_as_undisturbed} streams have "
        f"those of one that was alone (others had near ties); longest pause {tally.longest_gap_s:.1f} s"
    )
