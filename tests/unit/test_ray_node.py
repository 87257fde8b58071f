"""What user code in feeders learns of the job's Ray."""

from __future__ import annotations

from pathlib import Path

from dataloaderjob.core.places import RAY_TASKS_VARIABLE
from dataloaderjob.core.settings import RayTasks
from dataloaderjob.providers.ray.node import RayNode, ray_of_tasks, without_ray

NODE = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/t", "RAY_JOB_ID": "7", "PATH": "/bin"}


def test_user_code_gets_rays_address_only_with_room_for_its_tasks():
    assert ray_of_tasks(NODE, "10.0.0.1:6379") == {}
    assert without_ray(NODE) == {"PATH": "/bin"}
    for tasks in (RayTasks(), RayTasks(cpus=2)):
        node = RayNode(Path("/tmp/r"), token_path=Path("token"), vital=(), tasks=tasks)
        assert (RAY_TASKS_VARIABLE in node.marks()) == bool(tasks.cpus)
        found = ray_of_tasks({**NODE, **node.marks()}, "10.0.0.1:6379")
        told = {"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED"}
        assert set(found) == (told if tasks.cpus else set())
