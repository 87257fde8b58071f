"""Ranks of jobs, each forked from this process: it reads the path of a job's config from each line, and prints how the
worst of its ranks ended.

Each writes what it had to FOLDER/RANK.json: digests of its batches, the error that ended it, its loader's state. With
"stop" they end after so many batches; with "state" they begin at one.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import staged_data
import stream_data
import torch
import torch.distributed as dist

import dataloaderjob


def one_rank(config: dict[str, Any], rank: int) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(config["ranks"])}
    if config.get("together", True):
        path = Path(config["folder"]) / "store"
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=config["ranks"])
    torch.manual_seed(config["seeds"][rank] if "seeds" in config else 7)
    given = {**config.get("dataset", {}), **(config["others"][rank] if "others" in config else {})}
    dataset = getattr(stream_data, config.get("kind", "Shards"))(**given)
    stage = getattr(staged_data, config["stage"]) if config.get("stage") else None
    loader = dataloaderjob.DataLoader(
        dataset, batch_size=2, num_workers=config["workers"] + config.get("more_workers", 0) * rank,
        tail=config.get("tail", "drop"), prefetch_factor=config.get("prefetch_factor"), stage=stage,
    )  # fmt: skip
    time.sleep(config.get("late_s", 0.0) * rank)
    if config.get("peeks") and not rank:
        next(iter(loader))
    if "state" in config:
        loader.load_state_dict(config["state"])
    had: list[str] = []
    ended = ""
    iterator = iter(loader)
    while len(had) != config.get("stop", -1):
        try:
            had += stream_data.digests_of([next(iterator)])
        except StopIteration:
            break
        except ValueError as exc:  # the dataset's own, and InputError
            ended = f"{type(exc).__name__}: {exc}"
            if isinstance(exc, dataloaderjob.InputError):
                break
            had.append("error")
        if dist.is_initialized():
            dist.barrier()
    return {"digests": had, "ended": ended, "state": loader.state_dict()}


def run(config: dict[str, Any]) -> int:
    children = []
    for rank in range(config["ranks"]):
        pid = os.fork()
        if not pid:
            torch.set_num_threads(1)
            os.environ["DATALOADERJOB_SOCKET"] = config["socket"]
            status = 1
            try:
                (Path(config["folder"]) / f"{rank}.json").write_text(json.dumps(one_rank(config, rank)))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(f"{run(json.loads(Path(line.strip()).read_text()))}\n")
        sys.stdout.flush()
