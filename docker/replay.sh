#!/usr/bin/env bash
# Replays docker/Dockerfile without a container engine, in a scratch folder that is removed at the end.
#
# It copies what the first stage copies, runs its install steps, starts the entry point with the paths of the image
# moved into the scratch folder and a free port, runs the health check, puts and gets a bundle, and stops the server.
# What it does not show: the base image, the user, the volume, and how Docker reads the file.
set -euo pipefail
cd "$(dirname "$0")/.."

dockerfile=docker/Dockerfile
export PATH=$PWD/.tools/bin:$PATH
unset VIRTUAL_ENV PYTHONPATH
command -v uv >/dev/null || { echo "replay.sh needs uv; run make setup" >&2; exit 1; }

scratch=$(mktemp -d)
server=
finish() {
    [[ -z $server ]] || kill -KILL "$server" 2>/dev/null || true
    rm -rf "$scratch"
}
trap finish EXIT

# uv leaves a lock file in the folder for temporary files.
mkdir "$scratch/tmp"
export TMPDIR=$scratch/tmp

# A path of the image as one below the scratch folder.
moved() {
    sed -E "s#(^|[ \"])/(opt|data|run)#\1$scratch/\2#g" <<<"$1"
}

copy() {
    local target=$scratch/src/${*: -1} source
    mkdir -p "$target"
    for source in "${@:1:$#-1}"; do
        if [[ -d $source ]]; then cp -R "$source/." "$target"; else cp "$source" "$target"; fi
    done
}

# The JSON list after the last CMD or ENTRYPOINT of an instruction, one word per line.
words_of() {
    local line
    line=$(moved "$(grep "^$1 " "$dockerfile")")
    "$scratch/opt/residual-store/bin/python" -c 'import json, sys; print(*json.loads(sys.argv[1]), sep="\n")' "[${line#*[}"
}

echo "install"
while read -r instruction arguments; do
    case "$instruction $arguments" in
    "COPY --from="*) ;;
    "COPY "*) read -ra words <<<"$arguments" && copy "${words[@]}" ;;
    "RUN docker/install.sh "*) (cd "$scratch/src" && eval "$(moved "$arguments")") ;;
    esac
done <"$dockerfile"

mkdir -p "$scratch/data" "$scratch/run/secrets"
export PATH=$scratch/opt/residual-store/bin:$PATH
mapfile -t entry < <(words_of ENTRYPOINT)
mapfile -t health < <(words_of HEALTHCHECK)
cd "$scratch"

echo "refuse to start without the token file"
if "${entry[@]}" --port 0 2>"$scratch/refusal"; then exit 1; fi
grep -q "^invalid-option: the token file" "$scratch/refusal"

echo "serve"
token=$(head -c 24 /dev/urandom | base64)
cat >"$scratch/run/secrets/tokens.toml" <<END
[[token]]
name = "replay"
sha256 = "$(printf %s "$token" | sha256sum | cut -d ' ' -f 1)"
runs = ["*"]
access = "write"
END
exec {output}< <(exec "${entry[@]}" --port 0)
server=$!
read -r line <&"$output"
port=${line##*:}

echo "check the health"
"${health[@]/:8731/:$port}"

echo "put and get"
python - "http://127.0.0.1:$port" "$token" <<'END'
import sys

import numpy as np

from residual_store import Bundle, errors, open_store

url, token = sys.argv[1:]
values = np.arange(1 << 20, dtype=np.float32)
with open_store(url, token=token) as store:
    receipt = store.put("replay/one", Bundle.of_arrays({"h": values}))
    assert receipt.durability == "disk"
    assert np.array_equal(store.get("replay/one").array(0), values)
with open_store(url) as store:
    try:
        store.get("replay/one")
    except errors.Unauthorized:
        pass
    else:
        raise SystemExit("the server gave a bundle to a client without a token")
END
[[ -d $scratch/data/bundles/replay/one ]]

echo "stop"
kill -TERM "$server"
wait "$server"
server=

echo "the replay is complete; no image was built"
