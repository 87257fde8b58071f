from .node import CfgNode

cfg = CfgNode({"INPUT": {"SIZE": 224, "FLIP": False}, "MODEL": {"NAME": "r50"}})
