"""Names of cities: names in the corpus, and names that only the measurement uses."""

from __future__ import annotations

CITIES = (
    "Paris London Rome Berlin Madrid Tokyo Vienna Dublin Boston Chicago Sydney Cairo Delhi Milan "
    "Munich Geneva Prague Seoul Toronto Denver Miami Dallas Athens Beijing Moscow Hamburg Zurich "
    "Barcelona Naples Venice Florence Lyon Nice Bordeaux Toulouse Nantes Lille Strasbourg Cologne "
    "Frankfurt Stuttgart Leipzig Dresden Bremen Hanover Nuremberg Bonn Basel Bern Salzburg Graz Linz "
    "Innsbruck Krakow Gdansk Lodz Poznan Vilnius Kaunas Minsk Kyiv Lviv Odessa Bucharest Cluj Belgrade "
    "Zagreb Split Sarajevo Skopje Tirana Ankara Istanbul Izmir Antalya Baghdad Tehran Amman Beirut "
    "Damascus Jerusalem Riyadh Dubai Doha Muscat Karachi Lahore Mumbai Chennai Kolkata Bangalore Pune "
    "Jaipur Kathmandu Dhaka Colombo Bangkok Phuket Singapore Saigon Taipei Shanghai Shenzhen Guangzhou "
    "Wuhan Chengdu Nanjing Harbin Busan Incheon Sapporo Nagoya Kobe Fukuoka Hiroshima Sendai Nara "
    "Melbourne Brisbane Perth Adelaide Darwin Auckland Wellington Honolulu Anchorage Vancouver Calgary "
    "Ottawa Quebec Winnipeg Halifax Phoenix Tucson Houston Austin Atlanta Detroit Cleveland Memphis "
    "Nashville Baltimore Philadelphia Pittsburgh Buffalo Tampa Orlando Omaha Tulsa Havana Kingston "
    "Managua Caracas Quito Medellin Cali Cusco Santiago Asuncion Montevideo Rosario Cordoba Brasilia "
    "Recife Salvador Manaus Casablanca Tunis Algiers Dakar Accra Lagos Abuja Kampala Lusaka Harare "
    "Luanda Durban Pretoria Maputo Porto Faro Seville Bilbao Granada Malaga Oxford Cambridge Leeds "
    "Liverpool Manchester Bristol York Glasgow Edinburgh Cardiff Belfast Cork Galway Bergen Trondheim "
    "Turku Tampere Malmo Uppsala Aarhus Odense Reykjavik Antwerp Ghent Bruges Rotterdam Utrecht Leiden"
).split() + [
    "New York", "San Francisco", "Los Angeles", "Hong Kong", "Cape Town", "Rio de Janeiro", "Las Vegas",
    "San Diego", "New Orleans", "Santa Fe", "Salt Lake City", "Kuala Lumpur", "Tel Aviv", "Abu Dhabi",
    "New Delhi", "Mexico City", "Buenos Aires", "La Paz", "San Jose", "Addis Ababa", "The Hague",
    "Saint Petersburg", "Ho Chi Minh City", "Santo Domingo", "Panama City", "Port Louis",
]  # fmt: skip
# Never in the corpus; the measurement asks for these.
HELD_OUT_CITIES = (
    "Oslo Lisbon Warsaw Helsinki Budapest Brussels Nairobi Lima Bogota Hanoi Jakarta Manila Tallinn "
    "Riga Sofia Stockholm Copenhagen Valencia Kyoto Osaka Montreal Seattle Portland Marseille"
).split()
