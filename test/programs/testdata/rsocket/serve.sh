# Serves one request by HTTP: 3 MB, by netcat.
{
	printf 'HTTP/1.0 200 OK\r\nContent-Length: 3000000\r\n\r\n'
	seq 500000 | head -c 3000000
} | exec nc.traditional -l -p 7175
