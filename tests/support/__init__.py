"""What several test modules need. Test modules import from here and never from each other.

Made-up data
    factory         tasks, trajectories, groups, criteria, judgements, credit, records of judge calls
    desk_rollouts   trajectories of the desk's scripted agent, with chosen faults
    small_run       a run folder of two steps, to be counted by hand
    policies        the tiny policy, with the same weights every time
    models          small Transformers models with random weights
    chat_templates  chat templates of known model families, as installed packages ship them
    configuration   the composed configuration of a training run
Stand-ins inside the process
    echo            an environment that echoes, and an engine that types a script
    module          a GRPO module with a trainer, ready to run or to be updated
    sampling        limits of a short rollout, and log-probs of a finished one by one forward pass
    fake_judge      a litellm provider with canned replies, and a client whose model it is
    chat_model      a tiny chat model, and an engine that acts and judges by the desk's scripts
    appworld_coder  an engine that solves AppWorld's miniature tasks, some of the time
Stand-ins behind HTTP or a socket
    loopback_judge  an OpenAI-compatible judge, right or wrong, quick or slow, as told
    hash_judge      a judge whose verdicts depend on the transcript
    model_server    a model that answers the n-th request as a test says
    tau_models      agent and user simulator for tau2
    fake_vllm       vLLM's HTTP surface over the tiny policy
    fake_appworld   AppWorld's fork server
Processes and runs
    runs            `train.py`, in this process or as a command, and what its run folder holds
    processes       whether processes are alive or gone
    vllm            where the real vLLM is installed, and rollouts for it
    browser         headless Chromium
    wandb_file      records of an offline file of W&B
Programs that tests start
    ddp_driver      replays an archive on one rank or two
    ranks_driver    jobs of several processes, with faults
    kill_driver     runs that are killed and resumed
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]  #: of the repository
