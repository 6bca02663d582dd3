"""What verl imports in each of its processes: replaces its heads and registers the policy losses.

    export VERL_USE_EXTERNAL_MODULES=fused_grpo.integrations.verl_plugin

An import of this module has these effects; nothing else of the package imports it.
"""

from fused_grpo.integrations import verl

verl.patch()
verl.register()
