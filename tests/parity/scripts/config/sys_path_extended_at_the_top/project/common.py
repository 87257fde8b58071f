options = {"base": 0}
