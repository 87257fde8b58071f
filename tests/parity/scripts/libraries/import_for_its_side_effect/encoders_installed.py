import json

plain = json.JSONEncoder.default


def default(self, value):
    return sorted(value) if isinstance(value, set) else plain(self, value)


json.JSONEncoder.default = default
