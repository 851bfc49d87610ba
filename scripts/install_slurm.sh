#!/usr/bin/env bash
# Installs Debian's (or Ubuntu's) Slurm and munge, if they are not there. Starts nothing. Usage: source it.
set -euo pipefail

missing=()
for program in slurmctld:slurm-wlm slurmd:slurm-wlm sbatch:slurm-wlm munged:munge; do
    PATH="$PATH:/usr/sbin" command -v "${program%:*}" >/dev/null || missing+=("${program#*:}")
done
if [ "${#missing[@]}" -gt 0 ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "Slurm is missing: have an administrator run 'apt-get install slurm-wlm munge'" >&2
        exit 2
    fi
    log=$(mktemp /tmp/install-slurm-XXXXXX.log)
    echo "installing slurm-wlm and munge (the log is $log)"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge; } \
        >"$log" 2>&1 || { tail -n 20 "$log" >&2; exit 1; }
fi
if [ "$(id -u)" != 0 ]; then
    echo "a cluster of several nodes on one machine needs root: run this as root" >&2
    exit 2
fi
