#!/opt/dataloaderjob/bin/python
"""pip of the feeder image's environment. Head, feeders and trainers can all import the packages that it installs.

The environment belongs to root, so that nobody changes it while a job runs. pip itself would only report that
permission is denied.
"""

import os
import runpy
import sys
import sysconfig

ELSEWHERE = ("--target", "-t", "--prefix", "--root", "--dry-run", "--python", "--help", "-h")


def is_for_environment(words: list[str]) -> bool:
    """Returns True if these arguments change the environment."""
    asked = [word.partition("=")[0] for word in words]
    return asked[:1] in (["install"], ["uninstall"]) and not set(asked) & set(ELSEWHERE)


if __name__ == "__main__":
    if is_for_environment(sys.argv[1:]) and not os.access(sysconfig.get_path("purelib"), os.W_OK):
        sys.exit(
            f"pip: the packages of this image belong to root, and this is user {os.getuid()}: in a Dockerfile put "
            "'USER root' before 'RUN pip install', and 'USER 65532:65532' after it"
        )
    del sys.path[0]  # this file's folder, in which it may be called pip.py
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
