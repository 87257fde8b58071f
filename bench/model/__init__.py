"""How accurate the model of `core/sizing.py` is: simulated and real pipelines, and pipelines whose limit is known.

`python -m bench.model [simulated] [real] [known] [running]` measures, writes bench/model/results.json, and makes
docs/guide/model-error.md of it. `python -m bench.model page` only makes the page.
"""
