#!/usr/bin/env bash
# Three helpers in three network namespaces, as on three hosts, measured from a fourth. Needs root, `ip` and `tc`.
#
#   benchmarks/three_networks.sh [--delay 10ms] OPTION-OF-BENCH-THROUGHPUT...
#
# Example: benchmarks/three_networks.sh --delay 5ms --reports 5000 --buckets 128 --without naive --json networks.json
# Everything it makes is gone afterwards: namespaces, the bridge, and a temporary folder with keys and ledgers.
set -euo pipefail

export TREFOIL_STARTED_BY="benchmarks/three_networks.sh $*"
delay=0ms
if [ "${1:-}" = "--delay" ]; then delay=$2; shift 2; fi
trefoil=$(command -v trefoil || echo "$(dirname "$0")/../.venv/bin/trefoil")
trefoil=$(readlink -f "$trefoil")
folder=$(mktemp -d); tag="tf$$"; network=10.77.$(( $$ % 256 )); pids=()

clean_up() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    for number in 1 2 3; do ip netns del "$tag-$number" 2>/dev/null || true; done
    ip link del "$tag" 2>/dev/null || true
    rm -rf "$folder"
}
trap clean_up EXIT

# The bridge is the querier's network; each helper has one end of a cable to it, and nothing else.
ip link add "$tag" type bridge
ip addr add "$network.254/24" dev "$tag"
ip link set "$tag" up
for number in 1 2 3; do
    ip netns add "$tag-$number"
    ip link add "$tag-h$number" type veth peer name eth0 netns "$tag-$number"
    ip link set "$tag-h$number" master "$tag" up
    ip -n "$tag-$number" addr add "$network.$number/24" dev eth0
    ip -n "$tag-$number" link set lo up
    ip -n "$tag-$number" link set eth0 up
    # Each packet that a helper sends waits so long, as on a way of that length.
    [ "$delay" = 0ms ] || tc -n "$tag-$number" qdisc add dev eth0 root netem delay "$delay"
done

# What mpc_helpers/DEPLOY.md has three operators do.
"$trefoil" keygen site "$folder/shop.key" --json "$folder/shop.json" > /dev/null
for number in 1 2 3; do
    "$trefoil" keygen helper --name "helper-$number" --address "https://$network.$number:8443" --dir "$folder/$number" > /dev/null
done
entries=(--entry "$folder/1/entry.json" --entry "$folder/2/entry.json" --entry "$folder/3/entry.json")
"$trefoil" helper-set new "$folder/helpers.json" "${entries[@]}" > /dev/null
for number in 1 2 3; do
    "$trefoil" helper-set sign "$folder/helpers.json" --key "$folder/$number/identity.key" > /dev/null
done
for number in 1 2 3; do
    cp "$folder/helpers.json" "$folder/$number/"
    python3 - "$folder/$number/config.json" "$folder/shop.json" <<'PYTHON'
import json, sys
config, site = (json.load(open(path)) for path in sys.argv[1:])
config["sites"] = {"shop.example": {"key": site["public_key"], "callers": ["shop.example"]}}
config["processes"], config["unchecked_histograms"] = 1, True
json.dump(config, open(sys.argv[1], "w"), indent=2)
PYTHON
    "$trefoil" ledger create --config "$folder/$number/config.json" > /dev/null
    ip netns exec "$tag-$number" "$trefoil" helper --config "$folder/$number/config.json" 2> "$folder/$number.log" &
    pids+=($!)
done
for number in 1 2 3; do
    for _ in $(seq 300); do
        curl --silent --insecure --max-time 2 --output /dev/null "https://$network.$number:8443/healthz" && break
        kill -0 "${pids[number - 1]}" || { cat "$folder/$number.log" >&2; exit 1; }
        sleep 0.2
    done
done

"$trefoil" bench throughput --helpers "$folder/helpers.json" --site-key "$folder/shop.key" "$@"
