#!/usr/bin/env bash
# A real web server on loopback that serves one directory, with byte ranges and basic authentication.
#   nginx.sh start STATE FILES [PORT]   serve FILES; prints the URL. PORT 0 or none: a free one
#   nginx.sh stop STATE                 stop what was started in STATE
# URL/x is open; URL/private/x asks for user "reader", password "s3cret". STATE/access.log has one line
# per request: status, bytes sent, range, method, path.
set -euo pipefail
usage() { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[[ $# -ge 2 ]] || usage
verb=$1 state=$(realpath -m "$2")
PATH=$PATH:/usr/sbin

stop() {
  [[ -s $state/nginx.pid ]] || return 0
  kill "$(cat "$state/nginx.pid")" 2>/dev/null || true
  for _ in $(seq 50); do [[ -e $state/nginx.pid ]] || break; sleep 0.1; done
}

start() {
  local files=$1 port=${2:-0}
  if [[ $port -eq 0 ]]; then
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  fi
  mkdir -p "$state/tmp"
  echo 'reader:{PLAIN}s3cret' >"$state/users"
  cat >"$state/nginx.conf" <<N
user $(id -un) $(id -gn);
worker_processes 2;
pid $state/nginx.pid;
error_log $state/error.log warn;
events { worker_connections 512; }
http {
  log_format short '\$status \$body_bytes_sent "\$http_range" \$request_method \$uri';
  access_log $state/access.log short;
  client_body_temp_path $state/tmp; proxy_temp_path $state/tmp; fastcgi_temp_path $state/tmp;
  uwsgi_temp_path $state/tmp; scgi_temp_path $state/tmp;
  sendfile on;
  tcp_nopush on;
  server {
    listen 127.0.0.1:$port;
    location / { root $files; }
    location /private/ { alias $files/; auth_basic hsstream; auth_basic_user_file $state/users; }
    location /whole/ { alias $files/; max_ranges 0; }
  }
}
N
  if ! nginx -q -c "$state/nginx.conf" 2>"$state/start.log"; then
    cat "$state/start.log" >&2
    exit 1
  fi
  echo "http://127.0.0.1:$port"
}

case $verb in
  start) [[ $# -ge 3 ]] || usage; stop; start "$(realpath "$3")" "${4:-0}" ;;
  stop) stop ;;
  *) usage ;;
esac
