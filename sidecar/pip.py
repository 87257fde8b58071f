#!/opt/dataloaderjob/bin/python
"""pip of the feeder image's environment: what it installs is there for head, feeders and trainers.

The environment is root's, so that nobody changes it while a job runs. pip itself would only say that permission is
denied.
"""

import os
import runpy
import sys
import sysconfig

ELSEWHERE = ("--target", "-t", "--prefix", "--root", "--dry-run", "--python", "--help", "-h")


def is_for_environment(words: list[str]) -> bool:
    """Whether these arguments change the environment."""
    asked = [word.partition("=")[0] for word in words]
    return asked[:1] in (["install"], ["uninstall"]) and not set(asked) & set(ELSEWHERE)


if __name__ == "__main__":
    if is_for_environment(sys.argv[1:]) and not os.access(sysconfig.get_path("purelib"), os.W_OK):
        sys.exit(
            f"pip: the packages of this image belong to root, and this is user {os.getuid()}: in a Dockerfile put "
            "'USER root' before 'RUN pip install', and 'USER 65532:65532' behind it"
        )
    del sys.path[0]  # this file's folder, which may have it as pip.py
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
