#!/usr/bin/env bash
# A real S3 server on loopback: Ceph RGW with one monitor and one storage daemon that keeps all in memory.
#   ceph.sh start STATE [PORT]   prints the endpoint; PORT 0 or none: a free one
#   ceph.sh stop STATE           stop what was started in STATE
# Access key "test", secret key "testsecret", region us-east-1, an empty bucket "hsstream".
set -euo pipefail
usage() { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[[ $# -ge 2 ]] || usage
verb=$1 state=$(realpath -m "$2")
conf=$state/ceph.conf

stop() {
  local file pid
  for file in "$state"/run/*.pid; do
    [[ -s $file ]] || continue
    pid=$(cat "$file")
    # Nothing here outlives the daemons, and a graceful end takes ten seconds.
    kill -9 "$pid" 2>/dev/null || true
    rm -f "$file"
  done
}

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

configure() {
  local fsid=$1 mon_port=$2 s3_port=$3
  rm -rf "$state"
  mkdir -p "$state"/{mon,osd,log,run}
  cat >"$conf" <<C
[global]
fsid = $fsid
mon host = v1:127.0.0.1:$mon_port
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = none
auth service required = none
auth client required = none
osd objectstore = memstore
memstore device bytes = 8589934592
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
run dir = $state/run
pid file = $state/run/\$name.pid
admin socket = $state/run/\$name.asok
log file = $state/log/\$name.log
[mon.a]
mon data = $state/mon
[osd.0]
osd data = $state/osd
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:$s3_port
rgw thread pool size = 64
C
}

boot() {
  local fsid osd mon_port
  fsid=$(cat /proc/sys/kernel/random/uuid) osd=$(cat /proc/sys/kernel/random/uuid)
  mon_port=$(free_port)
  configure "$fsid" "$mon_port" "$1"
  monmaptool --create --fsid "$fsid" --addv a "[v1:127.0.0.1:$mon_port]" "$state/monmap"
  ceph-mon -c "$conf" --mkfs -i a --monmap "$state/monmap"
  ceph-mon -c "$conf" -i a
  timeout 30 ceph -c "$conf" osd new "$osd"
  ceph-osd -c "$conf" -i 0 --mkfs --osd-uuid "$osd"
  ceph-osd -c "$conf" -i 0
  radosgw -c "$conf" -n client.rgw.a
  for _ in $(seq 240); do curl --noproxy '*' -s -o /dev/null "http://127.0.0.1:$1" && break; sleep 0.25; done
  timeout 30 radosgw-admin -c "$conf" user create --uid=test --display-name=test \
    --access-key=test --secret-key=testsecret
  curl --noproxy '*' -sS -f -X PUT --aws-sigv4 aws:amz:us-east-1:s3 --user test:testsecret \
    -H 'x-amz-content-sha256: UNSIGNED-PAYLOAD' "http://127.0.0.1:$1/hsstream"
}

start() {
  local port=$1 log
  [[ $port -ne 0 ]] || port=$(free_port)
  log=$(mktemp)
  # Now and then the storage daemon loses a race with the monitor on a busy machine: begin afresh.
  for _ in 1 2 3; do
    stop
    # A process of its own: `set -e` is off inside the condition of an `if`.
    if "$0" boot "$state" "$port" >"$log" 2>&1; then
      rm -f "$log"
      echo "http://127.0.0.1:$port"
      return
    fi
  done
  stop
  cat "$log" >&2
  exit 1
}

case $verb in
  start) start "${3:-0}" ;;
  boot) boot "$3" ;;
  stop) stop ;;
  *) usage ;;
esac
