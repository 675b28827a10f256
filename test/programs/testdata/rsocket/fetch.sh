# Fetches what serve.sh serves: fetch.sh PROGRAM ADDRESS
case $1 in
wget) wget --tries=1 -qO- "http://$2:7175/" ;;
curl) curl -sS "http://$2:7175/" ;;
esac | sha256sum >/tmp/got."$1"
seq 500000 | head -c 3000000 | sha256sum | cmp - /tmp/got."$1"
