#!/usr/bin/env bash
# Compress, gate, push: what a CI job runs, and safe to run again.
#
#   recipes/ci.sh MODEL REPO
#
# RECIPE  recipe of the compression, a file or one of ours    EVAL   flags of cskv eval
# GATES   conditions, with blanks between them                CSKV_RUN, HF_TOKEN, HF_HOME  as for cskv itself
#
# Exits with 3 where a gate does not hold; nothing is pushed then.
set -euo pipefail
model=$1 repo=$2
: "${CSKV_RUN:=cskv-run}" "${RECIPE:=smollm2-135m}" "${EVAL:=--task perplexity --task retrieval}"
: "${GATES:=perplexity_ratio<=1.15 compression>=0.75}"
export CSKV_RUN

cskv compress "$model" --recipe "$RECIPE" --push "$repo" --dry-run # a wrong token or setting fails here
cskv compress "$model" --recipe "$RECIPE"
# shellcheck disable=SC2086 # EVAL and GATES are lists
cskv eval $EVAL $(printf -- '--fail-under %s ' $GATES) --json >"$CSKV_RUN/eval.json"
cskv export --push "$repo"
