STATE = {"scale": 1, "log": None}
