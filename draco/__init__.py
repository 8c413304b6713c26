"""draco: train long-horizon tool-use agents that have no verifier (DRACO, arXiv 2609.04094).

Importing the package sets defaults for environment variables that other libraries read at their own import. Whatever
the user has set stays.
"""

import os as _os

for _name, _value in {
    # Spinning OpenMP threads fight over busy cores (rollouts, judge, loader): let them sleep.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Nothing is downloaded unless the user says so (HF_HUB_OFFLINE=0 to fetch a model by its hub name).
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Else litellm fetches a price table at import.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "WANDB_SILENT": "true",
}.items():
    _os.environ.setdefault(_name, _value)

__version__ = "0.1.0"
