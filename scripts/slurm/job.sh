# shellcheck shell=bash
# What all jobs have in common, those of scripts/slurm and those of NeMo-Run: from the allocation to a trained policy,
# in one log.
# Usage, in a job script: source scripts/slurm/job.sh CONFIG [OTHER_CONFIG] [section.setting=value …]
#
# One srun step trains, a rank for each task of the job or of its first heterogeneous component; another one runs a
# rollout server for each task of the second component, if there is one. From the environment that submits:
#
#   PYTHON            what has the trainer's packages (default: .venv where the job runs, or python3)
#   SERVER_PYTHON     what has SGLang or vLLM, an environment of its own: a path that all nodes with servers have
#                     (rollout.launch.command replaces it)
#   CONTAINER         image in which all steps run: a .sif file by Apptainer, any other by Pyxis; SERVER_CONTAINER:
#                     another one for the servers
#   CONTAINER_MOUNTS  what containers see besides the folder where the job runs, and those of CONFIG and PROLOGUE,
#                     as /from:/to,/from:/to
#   PROLOGUE          a file of bash, sourced in each task before its program: modules, exports. With Pyxis it is
#                     sourced in the container, else before one
#   HEALTH_CHECK      1: look at the GPUs of all nodes, and add up a tensor over all ranks, before anything starts;
#                     HEALTH_CHECK_GBPS: the least GB/s of a GPU between nodes (default: 10)
#
# Exit codes: 0 done; 2 the user's to mend; 1 a crash; 75 saved, to be submitted again; 128+n ended by signal n.
set -uo pipefail

config=$1
shift
if [ $# -gt 0 ] && [[ $1 != *=* ]]; then
    config=$1
    shift
fi
settings=("$config" "$@")

say() { echo "$*"; }

stamp() { # every line gets the seconds since the job began
    trap '' TERM INT USR1
    local line
    while IFS= read -r line || [ -n "$line" ]; do printf '[%5d s] %s\n' "$SECONDS" "$line"; done
}
exec 3>&1 > >(stamp) 2>&1
stamper=$!

end_with() { # CODE WORDS…: the last words, once the log has all the others
    local code=$1
    shift
    say "$*"
    exec >&3 2>&3
    wait "$stamper"
    exit "$code"
}

# --- the allocation -------------------------------------------------------------------------------------------------

names() { scontrol show hostnames "$1" | paste -sd ' '; }
address() { scontrol show node "$1" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2; }

on_actors=(srun) on_servers=()
actor_nodes=$(names "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}") server_nodes=
ranks=${SLURM_NTASKS_HET_GROUP_0:-$SLURM_NTASKS}
MASTER_ADDR=$(address "${actor_nodes%% *}")
[ -n "$MASTER_ADDR" ] || end_with 1 "error: scontrol does not tell the address of ${actor_nodes%% *}"
# Tasks may use all cores of their node, and are not bound to one each.
each_step=(--cpu-bind=none --chdir="$PWD")
if [ -n "${SLURM_JOB_NODELIST_HET_GROUP_1:-}" ]; then
    on_actors=(srun --het-group=0) on_servers=(srun --het-group=1)
    server_nodes=$(names "$SLURM_JOB_NODELIST_HET_GROUP_1")
    MEGATRON_DPPO_SERVER_HOSTS=
    for node in $server_nodes; do
        for ((task = 0; task < SLURM_NTASKS_HET_GROUP_1 / SLURM_JOB_NUM_NODES_HET_GROUP_1; task++)); do
            MEGATRON_DPPO_SERVER_HOSTS+=${MEGATRON_DPPO_SERVER_HOSTS:+,}$(address "$node")
        done
    done
    MEGATRON_DPPO_SERVER_SECRET=$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')
    export MEGATRON_DPPO_SERVER_HOSTS MEGATRON_DPPO_SERVER_SECRET
fi
export MASTER_ADDR PYTHONUNBUFFERED=1

# --- the steps ------------------------------------------------------------------------------------------------------

prologue=()
if [ -n "${PROLOGUE:-}" ]; then
    [ -r "$PROLOGUE" ] || end_with 2 "error: PROLOGUE = $PROLOGUE: there is no such file, or it cannot be read"
    PROLOGUE=$(realpath "$PROLOGUE")
    # shellcheck disable=SC2016 # the inner bash expands it
    prologue=(bash -c 'source "$0" || { echo "error: PROLOGUE = $0: ended with exit code $?" >&2; exit 2; }; exec "$@"'
        "$PROLOGUE")
fi
mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
outside() { [ -f "$1" ] && [[ $(realpath "$1") != "$(realpath .)"/* ]]; } # FILE: of the folder where the job runs
outside "$config" && settings[0]=$(realpath "$config")
for file in "${settings[0]}" "${PROLOGUE:-}"; do
    outside "$file" && mounts+=,$(dirname "$file"):$(dirname "$file")
done
python=${PYTHON:-$([ -x .venv/bin/python ] && [ -z "${CONTAINER:-}" ] && echo .venv/bin/python || echo python3)}

in_container() { # IMAGE: for steps that run in it: flags of srun in the array `inside`, first words in `within`
    inside=() within=("${prologue[@]}")
    case $1 in
    '') ;;
    *.sif) within+=(apptainer exec --nv --pwd "$PWD" --bind "$mounts" "$1") ;;
    *) inside=(--container-image="$1" --container-workdir="$PWD" --container-mounts="$mounts") ;;
    esac
}

# A step ends when a rank does: of the others, those that hang in a collective are ended a minute later.
train() {
    in_container "${CONTAINER:-}"
    exec "${on_actors[@]}" "${each_step[@]}" --wait=60 --kill-on-bad-exit=0 "${inside[@]}" "${within[@]}" \
        "$python" -m megatron_dppo train "${settings[@]}" </dev/null
}
serve() { # [--check]
    in_container "${SERVER_CONTAINER:-${CONTAINER:-}}"
    exec "${on_servers[@]}" "${each_step[@]}" --kill-on-bad-exit=1 "${inside[@]}" "${within[@]}" \
        "$python" -m megatron_dppo serve "${settings[@]}" "$@" </dev/null
}
health() { # ADDRESS SRUN…: of the nodes of these steps
    MASTER_ADDR=$1 "${@:2}" "${each_step[@]}" --kill-on-bad-exit=1 "${inside[@]}" "${within[@]}" \
        "$python" -m megatron_dppo.launch.health </dev/null
}
check() { # prints how far the run is: RUN.DIR: 30 of 100 steps are done
    in_container "${CONTAINER:-}"
    "${on_actors[@]}" "${each_step[@]}" --nodes=1 --ntasks=1 --ntasks-per-node=1 "${inside[@]}" "${within[@]}" \
        "$python" -m megatron_dppo train "${settings[@]}" --check "$ranks" </dev/null | tail -n 1 # containers may greet
}

# --- what can be seen to be missing ---------------------------------------------------------------------------------

for name in CONTAINER SERVER_CONTAINER; do
    image=${!name:-}
    [ -n "$image" ] || continue
    case $image in /* | ./* | ../* | *.sif)
        [ -e "$image" ] || end_with 2 "error: $name = $image: there is no such file" ;;
    esac
    if [[ $image = *.sif ]]; then
        "${prologue[@]}" bash -c 'command -v apptainer' >/dev/null ||
            end_with 2 "error: $name = $image: there is no apptainer on the path; PROLOGUE can load it"
        continue
    fi
    srun --help | grep -q container-image ||
        end_with 2 "error: $name = $image: this cluster's srun knows no --container-image, since it lacks Pyxis"
done
if [ -z "${CONTAINER:-}" ] && ! "${prologue[@]}" "$python" -c 'import megatron_dppo.settings'; then
    end_with 2 "error: PYTHON = $python: cannot import megatron_dppo: set PYTHON to an interpreter that can, or CONTAINER (docs/gpu.md installs both)"
fi

# --- the run --------------------------------------------------------------------------------------------------------

say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), $(date '+%F %T'): ${settings[*]}"
say "settings: looking for mistakes on ${actor_nodes%% *}"
before=$(check)
code=$?
[ $code = 0 ] || end_with $code "ended with exit code $code before anything was started: the reason is above"
say "settings: $before"
run_dir=${before%: *}
if [ -n "$server_nodes" ]; then
    say "settings: looking for mistakes on $server_nodes"
    (serve --check >/dev/null)
    code=$?
    [ $code = 0 ] || end_with $code "ended with exit code $code before anything was started: the reason is above"
fi

if [ "${HEALTH_CHECK:-0}" != 0 ]; then
    say "health: of $ranks ranks on $actor_nodes"
    in_container "${CONTAINER:-}"
    health "$MASTER_ADDR" "${on_actors[@]}" || end_with 1 "ended before anything was started: the fault is above"
    if [ -n "$server_nodes" ]; then
        say "health: of $server_nodes"
        in_container "${SERVER_CONTAINER:-${CONTAINER:-}}"
        health "$(address "${server_nodes%% *}")" "${on_servers[@]}" ||
            end_with 1 "ended before anything was started: the fault is above"
    fi
fi

stop_asked='' cancelled='' actors='' servers=''
trap 'stop_asked=1' USR1
trap 'cancelled=1' TERM

last_words() { # of the servers on nodes that Slurm has lost
    local node
    for node in $(sinfo -h -N -n "${actor_nodes// /,}${server_nodes:+,${server_nodes// /,}}" -t down -o %N | sort -u); do
        say "node $node is down"
        [ -f "$run_dir/servers/server-$node.log" ] || continue
        say "the last lines of its server:"
        tail -n 15 "$run_dir/servers/server-$node.log" | sed "s/${MEGATRON_DPPO_SERVER_SECRET:-no secret}/***/g"
    done
}
runs() { [ -n "$1" ] && kill -0 "$1" 2>/dev/null; }
grace() { # SECONDS: for the steps to end in
    local i
    for ((i = 0; i < $1; i++)); do runs "$actors" || runs "$servers" && sleep 1; done
}
stop_servers() {
    runs "$servers" || return 0
    say "servers: stopping"
    # It signals the step; to srun SIGTERM would mean SIGKILL.
    scancel --signal=TERM "$SLURM_JOB_ID_HET_GROUP_1" || kill -TERM "$servers"
    wait "$servers"
}

if [ -n "$server_nodes" ]; then
    say "servers: starting $SLURM_NTASKS_HET_GROUP_1 on $server_nodes"
    serve &
    servers=$!
fi
mkdir -p "$run_dir"
export MEGATRON_DPPO_FAILURE="$run_dir/.failure-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
say "actors: starting $ranks ranks on $actor_nodes"
train &
actors=$!

while runs "$actors"; do
    if [ -n "$cancelled" ]; then
        grace 5
        last_words
        end_with 143 "ended by Slurm: cancelled, preempted, or a node was lost"
    fi
    if [ -n "$server_nodes" ] && ! runs "$servers"; then
        wait "$servers"
        code=$?
        say "servers: ended with exit code $code while the actors were running, which are stopped"
        last_words
        kill -TERM "$actors"
        grace 10
        end_with $((code ? code : 1)) "ended with exit code $((code ? code : 1)): the reason is above"
    fi
    if [ -n "$stop_asked" ]; then
        say "actors: told to save and stop"
        stop_asked=''
        kill -USR1 "$actors"
    fi
    sleep 1 &
    wait $! # which a signal ends at once
done
wait "$actors"
code=$?
# Saved it has, though a rank was killed on its way out.
[ ! -s "$MEGATRON_DPPO_FAILURE" ] || [ "$(head -n 1 "$MEGATRON_DPPO_FAILURE")" != 75 ] || code=75
if [ $code = 0 ] && [ ! -e "$MEGATRON_DPPO_FAILURE.end-0" ]; then
    say "actors: rank 0 ended with exit code 0 before its job had ended: code that it calls ended the process"
    code=1
fi
rm -f "$MEGATRON_DPPO_FAILURE" "$MEGATRON_DPPO_FAILURE".end-*
say "actors: ended with exit code $code"
stop_servers
case $code in
0) end_with 0 "done: $(check)" ;;
2) end_with 2 "ended: the reason is above, and can be mended" ;;
75 | 138) # 138: a rank that was told to stop before it could listen
    after=$(check)
    [ "$after" != "$before" ] ||
        end_with 75 "not requeued, since nothing was gained: $after. Give the job more --time, or less --signal"
    say "requeued: $after"
    trap 'exit 75' TERM
    scontrol requeue "$SLURM_JOB_ID" || end_with 75 "cannot be requeued; submit it again, and it resumes"
    sleep 300 & # Slurm ends this script
    wait $!
    exit 75
    ;;
*) end_with "$code" "ended: a rank crashed or was killed; its message is above. Submitted again, it resumes from the last checkpoint" ;;
esac
