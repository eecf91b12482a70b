#!/usr/bin/env bash
# Installs the distribution's packages that the tests of GPU code need and that pip does not have, where they are missing.
#
#   scripts/gpu_packages.sh metal     clang, for the check of Metal kernels
#   scripts/gpu_packages.sh vulkan    headers, glslc and lavapipe, Mesa's Vulkan driver for the CPU
#
# Debian and Ubuntu; elsewhere it names what has to be there.
set -euo pipefail

case "${1-}" in
metal)
    for clang in clang++ clang++-{22,21,20,19,18,17,16,15}; do
        if command -v "$clang" > /dev/null; then
            exit 0
        fi
    done
    packages=(clang-16 libclang-rt-16-dev)
    # whichever the distribution calls its default, where it has no 16
    fallback=(clang)
    ;;
vulkan)
    packages=(libvulkan-dev spirv-headers glslc mesa-vulkan-drivers)
    fallback=()
    ;;
*)
    echo "usage: $0 metal|vulkan (got '${1-}')" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query > /dev/null; then
    echo "$0: no dpkg here. Install what Debian calls: ${packages[*]}" >&2
    exit 1
fi

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null || true)
    test "$status" = installed || missing+=("$package")
done
test ${#missing[@]} -gt 0 || exit 0

sudo=()
if test "$(id -u)" -ne 0; then
    if ! command -v sudo > /dev/null; then
        echo "$0: not root and no sudo. As root: apt-get install ${missing[*]}" >&2
        exit 1
    fi
    sudo=(sudo)
fi

"${sudo[@]}" apt-get update -qq
install=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends)
if ! "${install[@]}" "${missing[@]}" > /dev/null; then
    test ${#fallback[@]} -gt 0
    "${install[@]}" "${fallback[@]}" > /dev/null
fi
