# Lets an Envoy end without a failed request: bash drain-envoy.sh ADMIN_PORT ANNOUNCE_SECONDS TIMEOUT_SECONDS
#
# Readiness fails and answers tell clients to close from the first line on; then new connections get time to go
# elsewhere, and requests to end. Needs bash alone: Envoy's images have no curl.
set -u

ask() { # METHOD PATH: prints the admin page's answer
  exec 3<>"/dev/tcp/127.0.0.1/$admin_port" || exit 0
  printf '%s %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n' "$1" "$2" >&3
  cat <&3
  exec 3>&-
}

requests() { # how many are under way
  local answer line
  answer=$(ask GET '/stats?filter=^http.gateway.downstream_rq_active$')
  line=${answer##*downstream_rq_active: }
  echo "${line%%[!0-9]*}"
}

admin_port=$1 announce_s=$2 timeout_s=$3
ask POST /healthcheck/fail >/dev/null
sleep "$announce_s"
for ((waited_s = 0; waited_s < timeout_s; waited_s++)); do
  [[ $(requests) == 0 ]] && break
  sleep 1
done
