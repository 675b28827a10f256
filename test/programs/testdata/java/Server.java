import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.io.OutputStream;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.HexFormat;
import java.util.concurrent.Executors;

/** An HTTP server on the JDK's HttpServer: java Server PORT. Listens on the wildcard address, as most do. */
public class Server {
    static final int LARGE_BYTES = 8 << 20;

    public static void main(String[] args) throws Exception {
        HttpServer server = HttpServer.create(new InetSocketAddress(Integer.parseInt(args[0])), 128);
        server.setExecutor(Executors.newFixedThreadPool(8));
        server.createContext("/seen", e -> answer(e, ("you are " + e.getRemoteAddress().getAddress().getHostAddress()
                + ", I am " + e.getLocalAddress().getAddress().getHostAddress() + ":" + e.getLocalAddress().getPort()
                + "\n").getBytes(StandardCharsets.UTF_8)));
        byte[] large = new byte[LARGE_BYTES];
        for (int i = 0; i < large.length; i++) {
            large[i] = (byte) (i * 7L % 251);
        }
        server.createContext("/large", e -> answer(e, large));
        server.createContext("/upload", e -> {
            byte[] body = e.getRequestBody().readAllBytes();
            answer(e, (body.length + " bytes, SHA-256 " + sum(body) + "\n").getBytes(StandardCharsets.UTF_8));
        });
        server.start();
        System.out.println("listening on " + server.getAddress());
    }

    static void answer(HttpExchange exchange, byte[] body) throws IOException {
        exchange.sendResponseHeaders(200, body.length);
        try (OutputStream out = exchange.getResponseBody()) {
            out.write(body);
        }
    }

    static String sum(byte[] data) {
        try {
            return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(data));
        } catch (java.security.NoSuchAlgorithmException e) {
            throw new IllegalStateException(e);
        }
    }
}
