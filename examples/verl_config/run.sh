#!/usr/bin/env bash
# A verl run with fused-grpo: the overrides of overrides.txt, then your own.
#
#   examples/verl_config/run.sh data.train_files=... actor_rollout_ref.model.path=...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# verl imports this in every process; it replaces the heads and registers the policy losses
export VERL_USE_EXTERNAL_MODULES=fused_grpo.integrations.verl_plugin

overrides=()
while IFS= read -r line; do
    overrides+=("$line")
done < <(grep -vE '^(#|$)' overrides.txt)
exec python3 -m verl.trainer.main_ppo "${overrides[@]}" "$@"
