# What connections a node's kernel tracks, each once, and the node's own addresses; until its input ends.
#
#     sh -c "$(cat connections.sh)" connections [FOLDER [SECONDS]]
#
# FOLDER has the kernel's tables (/proc/net). A connection stays in them for two minutes after its end, a lookup in
# DNS for half a minute: a look every SECONDS (2) misses none, and costs some milliseconds.
set -u
folder=${1:-/proc/net}
seconds=${2:-2}

for program in awk timeout; do
    command -v $program >/dev/null || { echo "the program $program is needed on the node, found none" >&2; exit 1; }
done
if [ -r "$folder/nf_conntrack" ]; then
    tracked() { cat "$folder/nf_conntrack"; }
elif conntrack -L >/dev/null 2>&1; then
    tracked() { conntrack -L 2>/dev/null; }
else
    echo "a table of connections is needed in $folder/nf_conntrack, or the program conntrack: found neither" >&2
    exit 1
fi

# Some addresses are there only while the node has pods: those of its ends of their links.
look() {
    awk '/\|--/ { address = $2 } /\/32 host LOCAL/ { print "local", address }' "$folder/fib_trie"
    tracked
}

# timeout ends with 0 only when the input did.
{
    while look; do
        timeout "$seconds" cat >/dev/null && break
    done
    look
} | awk '
/^local / { if (!($0 in seen)) { seen[$0] = 1; print; fflush() } next }
{   # alike but for the ports that are drawn for each connection, and what changes while it lasts
    key = ""; ports = 0
    for (i = 1; i <= NF; i++) {
        if ($i ~ /^[sd]port=/) ports++
        if (ports == 1 && $i ~ /^sport=/ || ports == 4 && $i ~ /^dport=/) continue
        if ($i ~ /^(src|dst|sport|dport)=/ || $i ~ /^(tcp|udp|sctp)$/) key = key " " $i
    }
    if (ports == 4 && !(key in seen)) { seen[key] = 1; print; fflush() }
}'
