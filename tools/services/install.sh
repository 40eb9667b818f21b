#!/usr/bin/env bash
# Install the real servers that the tests marked `services` talk to: nginx and Ceph RGW (Debian, Ubuntu).
# Does nothing when they are there. Needs root, or sudo without a password.
set -euo pipefail

missing=()
command -v nginx >/dev/null || [[ -x /usr/sbin/nginx ]] || missing+=(nginx)
for pair in radosgw:radosgw ceph-mon:ceph-mon ceph-osd:ceph-osd ceph:ceph-common monmaptool:ceph-common; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
command -v curl >/dev/null || missing+=(curl)
[[ ${#missing[@]} -eq 0 ]] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "install.sh: no apt-get here; install by hand: ${missing[*]}" >&2
  exit 1
fi
as_root=()
[[ $(id -u) -eq 0 ]] || as_root=(sudo -n)
export DEBIAN_FRONTEND=noninteractive
# Packages of Debian start their daemons on installation; exit code 101 from policy-rc.d forbids that.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
  "${as_root[@]}" chmod +x "$policy"
  trap '"${as_root[@]}" rm -f "$policy"' EXIT
fi
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
