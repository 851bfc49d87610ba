from megatron_dppo.api import Run as Run
from megatron_dppo.api import load_config as load_config
from megatron_dppo.api import train as train
from megatron_dppo.config import Config as Config
from megatron_dppo.rl.prune import prune as prune

__version__: str
