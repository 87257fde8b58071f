def label_id(name, _ids={}):
    return _ids.setdefault(name, len(_ids))
