#!/usr/bin/env bash
# Everything that is too long for .ci/run, in parts of about five minutes: a sample of mutants, mistakes in code that
# needs ranks, kills at random, hostile input, all tests with real servers, Slurm, Chromium, TRL and verl, and the second
# Python with the newest Megatron-Core. It takes a night; a part that fails stops no other.
#   (none)            all parts
#   PART...           these, by the names that --list prints
#   --part-of COMMIT  one part, which the commit's hash chooses
#   --last-passes     the day and the commit at which each part last passed here, from .ci/last_passes.tsv
# Parts that pass are written to .ci/last_passes.tsv: commit the file.
set -uo pipefail
cd "$(dirname "$0")/.."
passes=.ci/last_passes.tsv
export OMP_NUM_THREADS=1

parts=()
for i in {0..14}; do parts+=("mutants-$i"); done    # 100 mutants each
for i in {0..5}; do parts+=("mistakes-$i"); done
for i in {0..9}; do parts+=("kills-$i"); done       # 10 kills each
for i in {0..2}; do parts+=("fuzz-$i"); done        # 2,000 cases each
for file in tests/servers/test_*.py; do parts+=("servers-$(basename "$file" .py)"); done
for file in tests/slurm/test_*.py; do
    ! grep -q 'mark\.slurm' "$file" || parts+=("slurm-$(basename "$file" .py)")
done
parts+=(kills-servers browser trl verl newest-laws newest-units newest-rehearsal smollm2 smollm2-vllm)

run_part() { # PART
    local number=${1##*-} name=${1#*-}
    case $1 in
    mutants-*)
        source scripts/install.sh cpu,dev,mutation
        python tools/mutation/sample.py --size 1500 --part "$number/15"
        ;;
    mistakes-*)
        source scripts/install.sh cpu,dev
        python tools/mutation/mistakes.py --part "$number/6"
        ;;
    kills-servers) bash scripts/chaos.sh 10 --servers ;;
    kills-*) bash scripts/chaos.sh 10 ;;
    fuzz-*)
        source scripts/install.sh cpu,dev
        FUZZ_SEED=$((2000 * number)) FUZZ_CASES=2000 python -m pytest tests/test_fuzz.py
        ;;
    servers-*) bash scripts/test.sh --servers "tests/servers/$name.py" ;;
    slurm-*) bash scripts/test.sh --slurm "tests/slurm/$name.py" ;;
    browser | trl | verl) bash scripts/test.sh "--$1" ;;
    newest-laws) bash scripts/test.sh --newest tests/laws ;;
    newest-units) bash scripts/test.sh --newest tests/models tests/parallel tests/bridge tests/trainer ;;
    newest-rehearsal) REHEARSAL_CASES=all bash scripts/test.sh --newest tests/rehearsal ;;
    smollm2) bash scripts/quickstart.sh --policy smollm2 run.dir=runs/smollm2-two-steps run.steps=2 eval.problems=40 ;;
    smollm2-vllm)
        bash scripts/quickstart.sh --policy smollm2 --servers vllm run.dir=runs/smollm2-vllm run.steps=2 eval.problems=40
        ;;
    *) echo "error: $1 is no part; --list prints all" >&2; return 2 ;;
    esac
}

note_pass() { # PART
    { grep -v "^$1	" $passes 2>/dev/null; printf '%s\t%s\t%s\n' "$1" "$(date +%F)" "$(git rev-parse --short HEAD)"; } |
        sort >$passes.new
    mv $passes.new $passes
}

case ${1:-} in
--list) printf '%s\n' "${parts[@]}"; exit ;;
--last-passes)
    for part in "${parts[@]}"; do
        printf '%s\t%s\n' "$part" "$(grep "^$part	" $passes 2>/dev/null | cut -f 2- || echo never)"
    done
    exit
    ;;
--part-of) set -- "${parts[$((16#${2:0:8} % ${#parts[@]}))]}" ;;
'') set -- "${parts[@]}" ;;
esac

first_failure=0 table=()
for part in "$@"; do
    began=$SECONDS
    printf '\n=== %s\n' "$part"
    (set -e; run_part "$part")
    code=$? # with || in front of it, set -e would have no effect in the part
    table+=("$(printf '%8d  %4d  %s' $((SECONDS - began)) $code "$part")")
    if [ $code = 0 ]; then note_pass "$part"; elif [ $first_failure = 0 ]; then first_failure=$code; fi
done
printf '\n%8s  %4s  %s\n' seconds exit part
printf '%s\n' "${table[@]}"
exit $first_failure
